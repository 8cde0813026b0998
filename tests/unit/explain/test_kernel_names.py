"""Decoding any text as a kernel name terminates, never raises, and gives a printable result."""

import json
import string

import msgspec
import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from stepscope.explain.kernel_names import CLASSES, KernelName, NamePart, decode, describe
from stepscope.explain.kernel_names.anatomy import LOOKED_AT, dissect
from stepscope.render.formats import Format
from stepscope.render.tables import render

# Parts of real names, so that random text reaches every family.
PIECES = [
    "void at::native::",
    "vectorized_elementwise_kernel<4, ",
    "multi_tensor_apply_kernel<",
    "_ZN2at6native",
    "ILi4E",
    "13reduce_kernel",
    "LNS_3FooE1E",
    "99999999999999999999",
    "ampere_sgemm_128x64_",
    "sm80_xmma_gemm_f32f32_tilesize",
    "sm80_xmma_fprop_implicit_gemm_",
    "nvjet_tst_1x1_",
    "cutlass_80_tensorop_s1688gemm_",
    "cutlass::Kernel2<",
    "volta_scudnn_128x",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80",
    "Flash_fwd_kernel_traits<",
    "flash_fwd_kernel<",
    "cudnn_generated_fort_native_sdpa_sm90_flash_",
    "triton_poi_fused_",
    "_to_copy",
    "Cijk_Ailk_Bljk_SB_MT",
    "igemm_fwd_gtcx3_nhwc_",
    "ncclDevKernel_",
    "Memcpy HtoD (",
    "[CUDA memcpy ",
    "softmax_warp_forward<",
    "_matmul_ogs_NNT_bf16xbf16xmxfp4_",
    "ck_tile::kentry<1, ",
    "(anonymous namespace)::",
    "<unnamed>::",
    "<",
    ">",
    "(",
    ")",
    "::",
    "x",
    "_",
    "128",
    "\x1b[31m",
    "\ud800",
    "\u202e",
]
SHAPE = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=12).map("".join)


def assert_presentable(decoded: KernelName, name: str) -> None:
    assert decoded.name == name
    assert decoded.kernel_class in CLASSES
    assert decoded.short
    assert len(decoded.short) <= 48
    assert decoded.short.isprintable()
    assert decoded.operation
    assert decoded.library
    assert len(decoded.parts) <= 40
    for piece in decoded.parts:
        assert len(piece.text) <= 120
        assert piece.text.isprintable()
        assert piece.meaning.isprintable()
    assert decoded.layout in (None, "nn", "nt", "tn", "tt")


@given(st.text() | SHAPE)
@settings(max_examples=400, deadline=None)
@example("")
@example(" ")
@example("_Z")
@example("_ZN")
@example("sm99999999999999999_xmma_gemm_")
@example("Cijk_Ailk_Bljk_SB_MT" + "9" * 5000 + "x1x1")
def test_any_text_decodes_into_something_presentable(name: str) -> None:
    decoded = decode(name)
    assert_presentable(decoded, name)
    table = describe(decoded)
    for format_ in Format:
        assert render(table, format_).encode()


@pytest.mark.parametrize("piece", [*PIECES, "maxpool", "gemm_sm1_", "1x", "((((", "<<<<", "_Z9", "T_", "E1E", "quant_"])
def test_only_the_beginning_of_a_megabyte_is_read(piece: str) -> None:
    name = (piece * (1_000_000 // len(piece) + 1))[:1_000_000]
    assert_presentable(decode(name), name)
    looked_at = dissect(name)
    assert max(map(len, (looked_at.base, looked_at.scope, looked_at.template, looked_at.arguments))) <= 4 * LOOKED_AT
    # Text after the beginning changes nothing.
    assert decode(name[:500_000] + "gemm").kernel_class == decode(name[:500_000] + "softmax").kernel_class
    assert any("first 4,000 characters" in note for note in describe(decode(name)).notes)


def test_real_names_are_cached_and_hostile_ones_are_not() -> None:
    from stepscope.explain.kernel_names import _decode_kept

    assert decode("ampere_sgemm_128x64_tn") is decode("ampere_sgemm_128x64_tn")
    before = _decode_kept.cache_info().currsize
    decode("x" * (LOOKED_AT + 1))
    assert _decode_kept.cache_info().currsize == before


@pytest.mark.parametrize(
    "name", ["", "foo", "my_custom_format_kernel", "kernel", "abnormal", "_Z3fooi", "compact_kernel"]
)
def test_meaningless_name_is_other(name: str) -> None:
    decoded = decode(name)
    assert decoded.kernel_class == "other"
    assert decoded.library == "unknown"
    assert any("not recognized: class other" in note for note in describe(decoded).notes)


@pytest.mark.parametrize(
    ("name", "scope", "base", "template"),
    [
        ("void at::native::foo<4, Bar<float> >(int)", "at::native", "foo", "4, Bar<float>"),
        ("void at::native::foo<(int)4, (bool)1, Bar<float>>(T1)", "at::native", "foo", "4, true, Bar<float>"),
        ("void <unnamed>::foo<(unsigned long)3>(T1 *)", "", "foo", "3"),
        ("std::enable_if<!(false), void>::type a::b::kernel<int, 7>(x)", "a::b", "kernel", "int, 7"),
        ("foo", "", "foo", ""),
        ("foo.kd", "", "foo", ""),
        ("void at::native::(anonymous namespace)::CatArrayBatc...", "at::native", "CatArrayBatc...", ""),
        ("foo(int) [clone .kd]", "", "foo", ""),
        ("void f<&g<int> >(void (*)(int))", "", "f", "&g<int>"),
        ("cut<off<in the", "", "cut", "off<in the"),
        ("_Z3fooILi4EfEvi", "", "foo", "4, float, int"),
        ("_ZN2at6native3fooILi4ELb1EN3c108BFloat16EEEvPT1_", "at::native", "foo", "4, true, c10, BFloat16"),
        ("_ZN12_GLOBAL__N_13fooIDF16bEEvv", "", "foo", "__bf16"),
        ("_ZN1a1bILNS_4EnumE12EE10long_names", "a", "b", "Enum, 12, long_names"),
    ],
)
def test_all_spellings_parse_alike(name: str, scope: str, base: str, template: str) -> None:
    found = dissect(name)
    assert (found.scope, found.base, found.template) == (scope, base, template)


def test_description_lists_parts_then_fields() -> None:
    table = describe(decode("ampere_sgemm_128x64_tn"))
    rows = [(row[0], row[2]) for row in table.rows]
    assert rows[:4] == [("ampere", "part"), ("sgemm", "part"), ("128x64", "part"), ("tn", "part")]
    fields = {row[2]: row[1] for row in table.rows}
    assert fields["kernel_class"] == "GEMM"
    assert fields["library"] == "cuBLAS"
    assert fields["tensor_cores"] == "no"
    assert any("TF32" in note for note in table.notes)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1", "align1"),
        ("Memcpy HtoD (Pageable -> Device)", "pin_memory"),
        ("triton_poi_fused__to_copy_1", "cast"),
        ("cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_32x3_nn_align16", None),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", None),
        ("Memcpy HtoD (Pinned -> Device)", None),
    ],
)
def test_advice_is_given_if_the_name_suffices(name: str, advice: str | None) -> None:
    notes = " ".join(describe(decode(name)).notes)
    assert (advice in notes) if advice else not notes


def test_structures_are_frozen_and_encode_as_json() -> None:
    decoded = decode("ampere_sgemm_128x64_tn")
    with pytest.raises(AttributeError):
        decoded.short = "x"  # type: ignore[misc]
    assert msgspec.json.decode(msgspec.json.encode(decoded), type=KernelName) == decoded
    assert isinstance(decoded.parts[0], NamePart)


def test_the_verb_prints_every_format_and_exits_with_zero() -> None:
    from stepscope.cli.kernel import kernel

    app = typer.Typer()
    app.command()(kernel)
    for format_ in Format:
        done = CliRunner().invoke(app, ["ampere_sgemm_128x64_tn", "--format", format_.value])
        assert done.exit_code == 0
        assert "cuBLAS" in done.stdout
    rows = json.loads(CliRunner().invoke(app, ["foo", "--format", "json"]).stdout)["rows"]
    assert {row["field"]: row["meaning"] for row in rows}["kernel_class"] == "other: not recognized"


def test_markup_in_a_name_is_not_interpreted() -> None:
    name = "[bold]softmax[/bold]<b>\x1b]8;;http://x\x07"
    for format_ in Format:
        assert "\x1b" not in render(describe(decode(name)), format_)
    assert set(decode(name).short) <= set(string.printable)
