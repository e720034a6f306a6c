"""The figure of a step's parts says what the numbers say."""

from minivllm import viz


def test_bars_are_stacked_in_order_and_end_with_their_sum():
    first = {"products": 3.0, "attention": 1.0}
    fig = viz.step_parts({"batch 1": {"before": first, "after": {"products": 1.0, "attention": 0.5}}}, [2.0], "t", "ms")
    [ax] = fig.axes
    assert [(bar.get_x(), bar.get_width()) for bar in ax.patches] == [(0, 3), (0, 1), (3, 1), (1, 0.5)]
    assert [text.get_text().strip() for text in ax.texts] == ["4", "1.5"]
    assert ax.lines[0].get_xdata() == [2.0, 2.0] and ax.get_title("left") == "batch 1"
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["floor", "products", "attention"]


def test_panels_have_their_own_floors():
    panels = {f"batch {n}": {"before": {"products": float(n)}} for n in (1, 2)}
    fig = viz.step_parts(panels, [0.5, 1.5], "t", "ms")
    assert [ax.lines[0].get_xdata()[0] for ax in fig.axes] == [0.5, 1.5]
    assert [ax.get_xlabel() for ax in fig.axes] == ["", "ms"]
