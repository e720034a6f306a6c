"""`make bench`: the workloads are what they say, and what was measured is written down as it was."""

import pytest

from benchmarks import engines, workloads
from benchmarks.results import markers, replace_block


def test_the_workloads_are_those_of_every_engine():
    first = workloads.make("W1")
    assert len(first) == 64 and first == workloads.make("W1") != workloads.make("W1", seed=1)
    assert all(32 <= len(prompt) <= 256 and 32 <= output <= 128 for prompt, output in first)
    assert all(100 <= token <= 40_000 for prompt, _ in first for token in prompt)
    assert (len(first[0][0]), first[0][1], first[0][0][:4]) == FIRST  # what the peers' own generator gives
    shared = workloads.make("W2")
    assert len(shared) == 32 and len({tuple(prompt[:512]) for prompt, _ in shared}) == 1
    assert len({tuple(prompt[512:]) for prompt, _ in shared}) == 32 and {output for _, output in shared} == {32}
    assert [(len(prompt), output) for prompt, output in workloads.make("W3")] == [(128, 128)]
    assert len(workloads.warm_up("W1")) == 16 and workloads.warm_up("W1")[0][0] != first[0][0]
    with pytest.raises(ValueError, match="unknown workload 'W4': give one of W1, W2, W3"):
        workloads.make("W4")


FIRST = (248, 81, [34478, 18163, 34296, 15533])


def line(rate: float, **more: object) -> dict[str, object]:
    return {"output_tok_per_s": rate, "version": "1.0", **more}


def test_medians_and_ratios_are_those_of_the_rounds():
    own = {"start_up_s": 4.0, "peak_rss_gib": 1.2, "outside_the_model": 0.04}
    rounds = [(100.0, 50.0, 10.0), (120.0, 40.0, 11.0), (90.0, 60.0, 30.0)]
    lines = {
        "minivllm": [[line(rate, **own) for rate in rates] for rates in rounds],
        "slow": [[line(50.0), line(25.0), line(22.0)]] * 3,
        "fast": [[line(80.0), line(20.0), line(1.0)]] * 3,
    }
    text = engines.report(lines, dict.fromkeys(lines, (0.988, 0.25)), "bf16")
    assert text.startswith("## Beside other engines on a CPU (")
    assert "| minivllm 1.0 | 100.0 (100, 120, 90) | 50.0 (50, 40, 60) | 11.0 (10, 11, 30) | 98.8%, gap 0.25 |" in text
    assert "| minivllm to the best peer | **1.25** | **2.00** | **0.50** | |" in text
    assert "to the first token 4.0 s; peak memory 1.20 GiB; of a step with 64 decodes, 4.0% is outside" in " ".join(
        text.split()
    )
    alone = engines.report({"minivllm": lines["minivllm"]}, {"minivllm": (1.0, 0.0)}, "bf16")
    assert "best peer" not in alone


BEGIN, END = markers("bench")


def test_a_new_block_replaces_the_old_one_and_nothing_else():
    before, after = "# Figures\n\nText.\n", "\n## More\n\nText.\n"
    first = replace_block(before, "bench", "one")
    assert first == f"# Figures\n\nText.\n\n{BEGIN}\none\n{END}\n"
    both = replace_block(first, "bench-gpu", "card") + after
    assert replace_block(both, "bench", "two") == both.replace("one", "two")


@pytest.mark.parametrize("text", [BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}{END}{END}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_broken_markers_are_refused(text):
    with pytest.raises(ValueError, match="mend it, or delete both"):
        replace_block(text, "bench", "block")


@pytest.mark.real_model
def test_an_engines_tokens_are_judged_by_float32(real_llm):
    """Its own greedy tokens are all float32's choice; others are not, by the difference of their logits."""
    from minivllm import SamplingParams

    prompt, _ = workloads.make("W1")[0]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [output] = real_llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    assert engines.agreement(real_llm, [tokens]) == (1.0, 0.0)
    share, gap = engines.agreement(real_llm, [[*tokens[:7], tokens[7] + 1]])
    assert share == 7 / 8 and gap > 0
