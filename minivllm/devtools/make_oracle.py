"""Writes data/oracle/smollm2-135m.json: what transformers' `generate` answers, and how sure it was.

The identity tests compare tokens, and two correct programs may differ where the two best logits are nearly
equal. So a prompt is taken only if the gap between them is at least MIN_GAP at every step.

Run: python -m minivllm.devtools.make_oracle
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import __version__ as transformers_version

from minivllm.model.default_model import ensure_default_model

MIN_GAP = 1e-3
NUM_PROMPTS, NUM_TOKENS = 16, 24
TARGET = Path(__file__).resolve().parents[2] / "data" / "oracle" / "smollm2-135m.json"

CANDIDATES = [
    "Hi",
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "A list of the planets in our solar system, in order of their distance from the sun:",
    "To make pancakes you need flour, milk, eggs and a pinch of salt. First,",
    "import numpy as np\n\nx = np.arange(10)\nprint(",
    "Photosynthesis is the process by which plants",
    "Q: What is the largest ocean on Earth?\nA:",
    "One, two, three, four, five, six, seven,",
    "Operating systems divide memory into pages of a fixed size. A page table maps each virtual page of "
    "a process to a physical frame, so that memory which looks contiguous to a program may lie anywhere. "
    "When a page is not",
    "A language model reads a text and predicts which token comes next. It does so again and again, and "
    "each time it looks back at all the tokens before. To avoid computing the same keys and values "
    "twice, it keeps them in a cache. The cache grows with every token, and so does the memory it needs. "
    "When many people ask at once, memory is what limits how many of them can be served together. That "
    "is why",
    "The sum of the angles of a triangle is",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n",
    "The best way to learn a language is to",
    "Her name was Alice, and she lived in a small village by the sea. Every morning she walked along the "
    "beach and looked for shells. One day she found a bottle with a letter inside. The letter said:",
    "Water boils at",
    "The three primary colours are red,",
    "In 1969, the first human beings landed on the Moon. The mission was called",
    "The quick brown fox jumps over the lazy dog. The lazy dog",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "Paris is to France as Berlin is to",
    "The theory of relativity, published by Albert Einstein in 1915, changed how we understand gravity. It says that",
    "The mitochondria is often called",
]


@torch.inference_mode()
def main() -> None:
    """Runs the candidates in order until NUM_PROMPTS are sure enough, and writes them."""
    folder = ensure_default_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cases = []
    for text in CANDIDATES:
        ids = tokenizer(text, return_tensors="pt")
        result = model.generate(
            **ids,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(result.logits).topk(2, dim=-1).values
        gap = float((best[..., 0] - best[..., 1]).min())
        print(f"{gap:9.5f}  {'kept' if gap >= MIN_GAP else 'near tie'}  {text[:60]!r}")
        if gap >= MIN_GAP:
            prompt = ids["input_ids"][0].tolist()
            output = result.sequences[0, len(prompt) :].tolist()
            cases.append({"text": text, "prompt_token_ids": prompt, "token_ids": output, "min_gap": round(gap, 5)})
        if len(cases) == NUM_PROMPTS:
            break
    source = f"transformers {transformers_version}, torch {torch.__version__.partition('+')[0]}, float32, CPU, greedy"
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps({"source": source, "min_gap": MIN_GAP, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
