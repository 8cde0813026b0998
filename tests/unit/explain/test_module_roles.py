"""Layers are numbered siblings that are alike; other numbers stay."""

from stepscope.explain.module_roles import find_roles
from tests.unit.recordings import GEMM_BF16, Timeline


def roles(*paths: str, **kinds: str) -> list[str]:
    return list(find_roles({path: kinds.get(path.rpartition(".")[2], "") for path in paths}).values())


def test_same_module_of_all_layers_has_one_role() -> None:
    assert roles("blocks.0.ffn.up", "blocks.12.ffn.up", "norm") == ["blocks.*.ffn.up", "blocks.*.ffn.up", "norm"]
    assert roles("h.0", "h.0.up", "h.1", "h.1.up") == ["h.*", "h.*.up", "h.*", "h.*.up"]
    assert roles("layer1.conv2", "layer2.conv2") == ["layer1.conv2", "layer2.conv2"]


def test_parts_of_a_sequential_keep_their_numbers() -> None:
    assert roles("0", "1.attention", "1.linear", "2") == ["0", "1.attention", "1.linear", "2"]
    assert list(find_roles({"0": "Linear", "1": "ReLU", "2": "Linear"}).values()) == ["0", "1", "2"]
    assert list(find_roles({"heads.0": "Linear", "heads.1": "Linear"}).values()) == ["heads.*", "heads.*"]
    assert roles("blocks.0.ffn.0", "blocks.0.ffn.2", "blocks.1.ffn.0", "blocks.1.ffn.2") == [
        "blocks.*.ffn.0",
        "blocks.*.ffn.2",
        "blocks.*.ffn.0",
        "blocks.*.ffn.2",
    ]


def test_a_layer_may_lack_a_submodule() -> None:
    assert roles("h.0.up", "h.0.down", "h.1.up", "h.1.down", "h.2.up")[-1] == "h.*.up"


def test_layers_are_alike_whichever_experts_run() -> None:
    experts = ((0, 1, 2), (5, 6, 7), (8, 1, 9))
    paths = [f"h.{layer}.experts.{one}.up" for layer, own in enumerate(experts) for one in own]
    assert set(roles(*paths)) == {"h.*.experts.*.up"}


def test_many_different_siblings_are_compared_in_reasonable_time() -> None:
    paths = [f"h.{number}.part{number}" for number in range(5_000)]
    assert roles(*paths) == paths


def test_parts_of_a_sequential_are_not_layers_of_a_trace() -> None:
    timeline = Timeline()
    with timeline.step():
        for path in ("0", "1.attention", "1.layers.0.up", "1.layers.1.up", "2"):
            with timeline.module(path):
                timeline.launch(GEMM_BF16, 10)
    layers = dict(timeline.profile().kernels.select("module", "layer").iter_rows())
    assert layers == {"0": None, "1.attention": None, "1.layers.0.up": 0, "1.layers.1.up": 1, "2": None}
