"""The explorer: a trace to walk through step by step, as a widget in a notebook and as a page of its own.

Both show what `view` makes of `Trace.state`: there is one renderer. The page needs no network and no kernel; all its
steps are in it, compressed, and the browser unpacks them.
"""

import base64
import gzip
import json
from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from minivllm.trace import Trace
from minivllm.viz.sentences import narrate
from minivllm.viz.state_view import view

MOST_STEPS = 2000


class Explorer:
    """A widget with a slider over the steps of a trace; as the last expression of a cell, it is shown.

    Attributes:
        trace: what is explored.
        slider: an IntSlider, over the indices of the steps.
        play: an ipywidgets.Play that moves the slider.
        html: an ipywidgets.HTML with the view of the current step.
        box: the widget that holds the three.
    """

    def __init__(self, trace: Trace, step: int = 0, interval_ms: int = 600) -> None:
        """Begins at a step.

        Args:
            trace: of at least one step; steps recorded later are not seen.
            step: index of the step to begin at; negative ones count from the end.
            interval_ms: how long each step stays while it plays, in milliseconds.

        Raises:
            ValueError: an empty trace, or no such step.
        """
        import ipywidgets as widgets  # takes as long to import as everything else in this package

        _check_not_empty(trace)
        trace.state(step)
        self.trace = trace
        value, last = step % len(trace), len(trace) - 1
        self.play = widgets.Play(value=value, min=0, max=last, interval=interval_ms)
        self.slider = widgets.IntSlider(value=value, min=0, max=last, description="step")
        self.slider.layout.width = "100%"
        self.html = widgets.HTML()
        widgets.jslink((self.play, "value"), (self.slider, "value"))
        self.slider.observe(self._show, names="value")
        self.box = widgets.VBox([widgets.HBox([self.play, self.slider]), self.html])
        self._show()

    @property
    def sentences(self) -> list[str]:
        """What the current step did."""
        return narrate(self.trace.state(self.slider.value), self.trace.header)

    def _show(self, change: Any = None) -> None:
        self.html.value = view(self.trace.state(self.slider.value), self.trace.header)

    def __repr__(self) -> str:
        return f"Explorer of {len(self.trace)} steps, at step {self.slider.value}: {' '.join(self.sentences)}"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget for a page with a kernel, the sentences for one without."""
        bundle = self.box._repr_mimebundle_(**kwargs)
        data, *metadata = bundle if isinstance(bundle, tuple) else (bundle,)
        data = {**data, "text/plain": repr(self)}
        return (data, *metadata) if metadata else data


def export_html(
    trace: Trace,
    path: str | PathLike[str],
    title: str = "What the engine did, step by step",
    steps: Sequence[int] | None = None,
) -> None:
    """Writes one HTML file with which anybody can walk through a trace; `FILE.html#step=12` opens step 12.

    Args:
        trace: what to show.
        path: of the file.
        title: of the page.
        steps: indices of the steps to show; None means all.

    Raises:
        ValueError: no step to show, more than 2,000, or one that the trace does not have.
    """
    _check_not_empty(trace)
    chosen = range(len(trace)) if steps is None else steps
    if not chosen:
        raise ValueError("steps is empty: name at least one step, or leave it None for all")
    if len(chosen) > MOST_STEPS:
        raise ValueError(
            f"{len(chosen)} steps are more than a page can hold ({MOST_STEPS}): choose some of them with "
            f"steps=range(0, {MOST_STEPS}), or every tenth with steps=range(0, {len(trace)}, 10)"
        )
    packed = _pack(trace, chosen)
    page = PAGE.replace("%FRAMES%", packed).replace("%TITLE%", escape(title))
    Path(path).write_text(page, encoding="utf-8")


def _pack(trace: Trace, steps: Sequence[int]) -> str:
    """The views of some steps as gzipped JSON in base64.

    Most of a view stood in the view before it too, but further back than gzip looks: so each distinct piece is
    stored once, and a step is a list of the numbers of its pieces.
    """
    numbers: dict[str, int] = {}
    frames = []
    for index in steps:
        state = trace.state(index)
        pieces = [numbers.setdefault(piece, len(numbers)) for piece in view(state, trace.header).split("<div")]
        frames.append([state.step, f"{state.end_s:.3f} s", pieces])
    text = json.dumps({"pieces": list(numbers), "frames": frames}, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _check_not_empty(trace: Trace) -> None:
    if not len(trace):
        raise ValueError(
            "the trace has no steps: record some first (`with llm.trace() as trace:` around llm.generate(...), or "
            "engine.start_recording() before engine.step())"
        )


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%TITLE%</title>
<style>
  body { margin: 0 auto; max-width: 1240px; padding: 14px 18px; background: #ECECEC; color: #222222;
         font: 13px/1.45 system-ui, sans-serif; }
  h1 { font-size: 19px; margin: 0 0 10px; }
  #controls { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin-bottom: 10px; position: sticky;
              top: 0; padding: 6px 0; background: #ECECEC; z-index: 1; }
  button { font: inherit; min-width: 38px; height: 30px; padding: 0 10px; border: 1px solid #777; border-radius: 4px;
           background: #FFF; color: #222; cursor: pointer; }
  button:disabled { color: #AAA; border-color: #CCC; cursor: default; }
  #slider { flex: 1 1 220px; accent-color: #0072B2; }
  #where { min-width: 190px; font-variant-numeric: tabular-nums; }
  #keys { color: #5A5A5A; margin-top: 8px; }
</style>
</head>
<body>
<h1>%TITLE%</h1>
<div id="controls">
  <button id="previous" title="previous step (left arrow)" aria-label="previous step">◀</button>
  <button id="play" title="play or pause (space)" style="width:76px">Play</button>
  <button id="next" title="next step (right arrow)" aria-label="next step">▶</button>
  <input id="slider" type="range" min="0" value="0" aria-label="step">
  <output id="where" for="slider"></output>
</div>
<div id="view">Unpacking…</div>
<div id="keys">Keys: ← and → go a step, Home and End to the first and the last, space plays and pauses.</div>
<noscript>This page needs JavaScript: its steps are packed.</noscript>
<script type="text/plain" id="frames">%FRAMES%</script>
<script>
"use strict";
const get = name => document.getElementById(name);
let pieces = [], frames = [], at = 0, timer = null;

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}
function go(index, keepAddress) {
  at = Math.max(0, Math.min(frames.length - 1, index));
  const [step, time, numbers] = frames[at];
  get("view").innerHTML = numbers.map(number => pieces[number]).join("<div");
  get("slider").value = at;
  get("slider").setAttribute("aria-valuetext", `step ${step}`);
  get("where").textContent = `step ${step} (${at + 1} of ${frames.length}), ${time}`;
  get("previous").disabled = at === 0;
  get("next").disabled = at === frames.length - 1;
  if (!keepAddress) history.replaceState(null, "", `#step=${step}`);
}
function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => at < frames.length - 1 ? go(at + 1) : play(false), 600) : null;
  get("play").textContent = on ? "Pause" : "Play";
}
function toggle() {
  if (timer === null && at === frames.length - 1) go(0);
  play(timer === null);
}
function goToAddress() {
  const wanted = /^#step=([0-9]+)$/.exec(location.hash);
  const index = wanted ? frames.findIndex(frame => frame[0] === Number(wanted[1])) : -1;
  go(index < 0 ? at : index, true);
}
function byHand(index) { play(false); go(index); }

get("previous").onclick = () => byHand(at - 1);
get("next").onclick = () => byHand(at + 1);
get("play").onclick = toggle;
get("slider").oninput = event => byHand(Number(event.target.value));
window.onhashchange = goToAddress;
document.onkeydown = event => {
  const act = { ArrowLeft: () => byHand(at - 1), ArrowRight: () => byHand(at + 1), Home: () => byHand(0),
                End: () => byHand(frames.length - 1), " ": toggle }[event.key];
  if (!act || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === " " && event.target.tagName === "BUTTON") return;  // the button takes it
  event.preventDefault();
  act();
};
unpack(get("frames").textContent).then(found => {
  ({ pieces, frames } = found);
  get("slider").max = frames.length - 1;
  goToAddress();
}).catch(error => {
  get("view").textContent = `The steps can't be unpacked (${error}): open the page in a browser from 2023 or later.`;
});
</script>
</body>
</html>
"""
