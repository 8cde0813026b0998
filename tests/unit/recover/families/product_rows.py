"""GEMMs recorded on an H200: name, grid, true sizes, counters, and the widths of the windows of rows, columns and inner
if the other sizes are known."""

from dataclasses import dataclass, field

from stepscope.explain.kernel_names import decode
from stepscope.recording.readers.counter_metrics import CounterKey
from stepscope.recover.facts import Sighting, Triple

Sizes = tuple[int, int, int, int]
SUM_OF_PARTS = (
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, 0, float, float, float, 1, 0, 0, 0>"
)
HALF_SUM_OF_PARTS = (
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false, float, "
    "__nv_bfloat16, __nv_bfloat16, true, false, false, false>(cublasLt::cublasSplitKParams<float>, float const*)"
)


@dataclass(frozen=True)
class Seen:
    name: str
    grid: Triple
    sizes: Sizes
    widths: tuple[int | None, ...] = ()
    counters: dict[CounterKey, int] = field(default_factory=dict)

    def sighting(self, *, counters: bool = True) -> Sighting:
        kept = self.counters if counters else {}
        return Sighting(index=0, name=decode(self.name), grid=self.grid, block=(384, 1, 1), counters=kept)

    def __str__(self) -> str:
        return f"{self.name[-60:]} {self.sizes}"


def seen(name: str, grid: Triple, sizes: Sizes, widths: tuple[int | None, ...] = (), **counters: int) -> Seen:
    return Seen(name, grid, sizes, widths, counters)  # type: ignore[arg-type]  # the keys are those of counters


def nvjet(rest: str) -> str:
    return f"nvjet_sm90_{rest}"


def xmma(layout: str, tile: str, warps: str, ending: str = "kernel") -> str:
    return (
        f"sm80_xmma_gemm_f32f32_f32f32_f32_{layout}_n_tilesize{tile}_stage3_warpsize{warps}_ffma_aligna4_alignc4"
        f"_execute_{ending}__5x_cublas"
    )


def xmma_tf32(tile: str) -> str:
    return (
        f"sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize{tile}_warpgroupsize1x1x1_execute_segment_k_off_kernel"
        "__5x_cublas"
    )


def cutlass(rest: str) -> str:
    return f"void cutlass::Kernel2<cutlass_{rest}>(T1::Params)"


# fmt: off
COUNTED = (
    seen(nvjet("tst_64x152_64x7_2x4_h_bz_bias_NNT"), (8, 15, 1), (600, 1920, 640, 1), (152, 64, 64),
         tensor_ops=1_494_220_800, fadd=1_167_360),
    seen(nvjet("tst_64x64_64x13_4x2_h_bz_bias_NNT"), (8, 15, 1), (600, 640, 640, 1), (64, 64, 64),
         tensor_ops=629_145_600, fadd=409_600),
    seen(nvjet("tst_128x104_64x7_4x2_h_bz_bias_NNT"), (8, 15, 1), (600, 2560, 640, 1), (104, 128, 64),
         tensor_ops=2_044_723_200, fadd=1_597_440),
    seen(cutlass("75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1"), (40, 32, 1), (600, 32003, 640, 1), (1, 1, 64),
         tensor_ops=26_319_257_600, fmul=20_561_920, store_bytes=38_403_600),
    seen(nvjet("tst_192x128_64x5_4x2_h_bz_coopB_bias_NNT"), (8, 15, 1), (768, 3600, 1200, 1), (128, 192, 64),
         tensor_ops=7_172_259_840, fadd=2_801_664),
    seen(nvjet("tst_64x128_64x8_4x2_h_bz_bias_NNN"), (8, 15, 1), (768, 1200, 1200, 1), (128, 64, 64),
         tensor_ops=2_390_753_280, fadd=933_888),
    seen(cutlass("75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1"), (48, 20, 1), (768, 20011, 1200, 1), (1, 1, 64),
         tensor_ops=37_534_826_496, fmul=15_433_728, store_bytes=30_736_896),
    seen(xmma_tf32("128x128x32"), (66, 2, 1), (1024, 3072, 1024, 1), (512, 512, 32),
         tensor_ops=6_442_450_944, fmul=152_064, ffma=3_145_728),
    seen(xmma_tf32("128x64x32"), (128, 1, 1), (1024, 1024, 1024, 1), (512, 256, 32),
         tensor_ops=2_147_483_648, fmul=147_456, ffma=1_048_576),
    seen(xmma_tf32("64x128x32"), (64, 2, 1), (1024, 1024, 4096, 1), (256, 512, 32),
         tensor_ops=8_589_934_592, fmul=147_456, ffma=1_048_576),
    seen(cutlass("80_tensorop_s1688gemm_256x128_32x3_tn_align1"), (64, 25, 1), (1024, 50257, 1024, 1), (1, 1, 32),
         tensor_ops=105_763_569_664, fmul=51_642_368, store_bytes=205_852_672),
    seen(cutlass("80_simt_sgemm_128x32_8x5_nn_align1"), (2, 1, 1), (32, 160, 1, 1), (1, 1, 8),
         fmul=8_192, ffma=65_536, store_bytes=20_480),
    seen(xmma("tn", "64x64x8", "1x4x1"), (8, 8, 4), (480, 512, 512, 1), (64, 64, 40),
         ffma=134_217_728, store_bytes=4_194_304),
    seen(xmma("tn", "64x64x8", "1x4x1", ending="split_k_kernel"), (8, 8, 2), (480, 512, 512, 1), (1, 1, None),
         fadd=1_048_576, ffma=262_144, store_bytes=983_040),
    seen(cutlass("80_simt_sgemm_64x64_8x5_tn_align1"), (16, 1, 8), (480, 128, 512, 1), (1, 1, 16),
         fmul=524_288, ffma=33_554_432, store_bytes=1_966_080),
    seen(SUM_OF_PARTS, (4, 30, 1), (480, 128, 512, 1), (1, 1, None),
         fadd=491_520, fmul=61_440, store_bytes=245_760),
    seen(xmma("tn", "32x32x8", "1x2x1"), (5, 5, 24), (160, 160, 64, 24), (1, 1, 8),
         ffma=39_936_000, store_bytes=2_457_600),
    seen(xmma("nn", "32x32x8", "1x2x1"), (5, 2, 24), (160, 64, 160, 24), (1, 1, 8),
         ffma=39_567_360, store_bytes=983_040),
    seen(xmma("tn", "64x128x8", "1x4x1"), (8, 11, 3), (480, 1408, 512, 1), (32, 128, 32),
         fadd=1_441_792, ffma=381_353_984, store_bytes=8_470_528),
    seen(xmma("tn", "128x64x8", "2x2x1"), (4, 8, 4), (480, 512, 1408, 1), (128, 64, 40),
         ffma=369_098_752, store_bytes=4_194_304),
    seen(xmma("nn", "64x64x8", "1x4x1"), (2, 36, 1), (128, 2304, 768, 1), (1, 1, 8),
         ffma=226_787_328, store_bytes=1_179_648),
    seen(cutlass("80_simt_sgemm_64x64_8x5_nn_align1"), (16, 2, 5), (128, 768, 768, 1), (1, 1, 8),
         fmul=491_520, ffma=75_988_992, store_bytes=1_966_560),
    seen(cutlass("80_simt_sgemm_128x32_8x5_nn_align1"), (32, 1, 5), (128, 768, 3072, 1), (1, 1, 8),
         fmul=491_520, ffma=302_481_408, store_bytes=1_966_560),
    seen(xmma("tn", "128x64x8", "2x2x1"), (1, 786, 1), (128, 50257, 768, 1), (1, 1, 8),
         ffma=4_951_523_328, store_bytes=25_731_584),
    seen(nvjet("tst_64x48_64x15_2x4_h_bz_TNT"), (8, 12, 1), (1024, 256, 1024, 1), (192, 128, 64),
         tensor_ops=603_979_776),
    seen(nvjet("tst_176x128_64x5_1x2_h_bz_TNN"), (2, 64, 1), (1024, 2816, 1024, 1), (256, 176, 64),
         tensor_ops=5_905_580_032),
    seen(nvjet("tst_256x128_64x4_1x2_h_bz_coopA_TNT"), (2, 66, 1), (1024, 32000, 1024, 1), (256, 256, 64),
         tensor_ops=67_108_864_000),
    seen(nvjet("hsh_64x48_64x15_2x4_h_bz_bias_TNT"), (8, 12, 1), (512, 512, 512, 1), (48, 64, 64),
         tensor_ops=301_989_888, fadd=270_336),
    seen(nvjet("hsh_128x256_64x4_2x1_v_bz_coopA_TNN"), (2, 66, 1), (512, 50304, 512, 1), (256, 256, 64),
         tensor_ops=26_440_892_416),
    seen(nvjet("tst_128x64_64x8_1x2_h_bz_TNT"), (2, 66, 1), (256, 256, 64, 48), (128, 128, 64),
         tensor_ops=402_653_184),
    seen(nvjet("tst_64x128_64x8_1x2_h_bz_NNN"), (2, 48, 1), (256, 64, 256, 48), (256, 64, 64),
         tensor_ops=402_653_184),
    seen(nvjet("tst_304x128_64x3_1x2_h_bz_coopA_TNN"), (2, 66, 1), (1024, 10000, 768, 1), (256, 304, 64),
         tensor_ops=15_778_971_648),
    seen(nvjet("tst_192x192_64x4_2x1_v_bz_coopB_TNN"), (2, 66, 1), (2048, 32000, 2048, 1), (192, 384, 64),
         tensor_ops=279_038_656_512),
    seen(nvjet("tst_80x64_64x11_2x4_h_bz_TNN"), (8, 12, 1), (768, 640, 1280, 1), (256, 160, 64),
         tensor_ops=1_258_291_200),
    seen(nvjet("tst_168x128_64x5_1x2_h_bz_TNN"), (2, 63, 1), (768, 3456, 1280, 1), (256, 168, 64),
         tensor_ops=6_936_330_240),
    seen(nvjet("hsh_32x64_64x16_2x4_h_bz_NNN"), (8, 12, 1), (256, 64, 256, 12), (256, 64, 64),
         tensor_ops=100_663_296),
    seen(xmma("tn", "128x128x8", "2x2x1"), (4, 8, 8), (512, 1024, 4096, 1), (128, 128, 72),
         ffma=2_147_483_648, store_bytes=16_777_216),
    seen(xmma("tn", "64x256x8", "1x4x1"), (8, 197, 1), (512, 50304, 1024, 1), (1, 1, 8),
         ffma=26_466_713_600, store_bytes=103_022_592),
)
# From traces: gradients, K splits, a GPU that is full or not.
TRACED = (
    seen(nvjet("tst_192x160_64x3_2x1_v_bz_coopB_NTT"), (2, 66, 1), (10000, 768, 1024, 1)),
    seen(nvjet("tst_96x128_64x6_2x1_v_bz_splitK_NNN"), (2, 64, 1), (1024, 768, 10000, 1)),
    seen(nvjet("tst_192x128_64x5_1x2_h_bz_coopB_splitK_NNT"), (2, 64, 1), (1024, 768, 50264, 1)),
    seen(nvjet("hsh_128x128_64x6_2x1_v_bz_splitK_NNT"), (2, 64, 1), (512, 512, 50304, 1)),
    seen(nvjet("tst_192x128_64x5_1x4_h_bz_coopB_NTT"), (4, 30, 1), (1024, 2816, 1024, 1)),
    seen(nvjet("tst_128x192_64x5_4x1_v_bz_coopB_NTN"), (4, 30, 1), (2816, 1024, 1024, 1)),
    seen(nvjet("tst_128x120_64x6_4x2_h_bz_TNT"), (8, 15, 1), (600, 2560, 640, 1)),
    seen(nvjet("hsh_192x48_64x7_1x4_h_bz_TNT"), (4, 24, 1), (192, 192, 64, 24)),
    seen(nvjet("tst_112x128_64x7_2x1_v_bz_TNN"), (2, 66, 1), (384, 4864, 896, 1)),
    seen(cutlass("75_tensorop_bf16_s1688gemm_bf16_128x256_nt_align1"), (504, 2, 1), (32003, 640, 600, 1)),
    seen(cutlass("75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1"), (20, 2, 21), (600, 640, 32003, 1)),
    seen(cutlass("75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1"), (200, 4, 96), (3137, 3137, 64, 96)),
    seen(cutlass("80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_nn_align8"), (4, 1, 37632), (8, 64, 8, 37632)),
    seen(cutlass("80_simt_sgemm_256x128_8x4_nn_align1"), (4, 1, 44), (128, 768, 50257, 1)),
    seen(cutlass("80_simt_sgemm_256x128_8x4_nt_align1"), (252, 1, 1), (16001, 512, 480, 1)),
    seen(xmma("tn", "64x64x8", "1x4x1"), (2, 12, 11), (128, 768, 2304, 1)),
    seen(xmma("nt", "64x128x8", "1x4x1"), (157, 4, 1), (10000, 512, 512, 1)),
    seen(xmma("nt", "32x32x8", "1x2x1"), (1, 2, 128), (32, 64, 64, 128)),
    seen(HALF_SUM_OF_PARTS, (24, 22, 1), (1024, 768, 10000, 1)),
    seen(HALF_SUM_OF_PARTS, (20, 38, 1), (600, 640, 32003, 1)),
)
# fmt: on

# From published traces of other GPUs with recorded shapes: the number of SMs, and a GEMM.
_A100_CUTLASS = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_{}_tn_{}>(x)"
_H100_XMMA = (
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize{}_warpgroupsize{}_execute_segment_k_off_kernel__5x_cublas"
)
FOREIGN: list[tuple[int, Seen]] = [
    (108, seen(_A100_CUTLASS.format("128x128_32x3", "align1"), (32, 1, 2), (1024, 512, 1705, 1))),
    (108, seen(_A100_CUTLASS.format("256x128_32x3", "align1"), (64, 1, 1), (1024, 1705, 512, 1))),
    (108, seen(_A100_CUTLASS.format("64x64_32x6", "align4"), (32, 1, 3), (1024, 96, 1024, 1))),
    (108, seen("ampere_sgemm_32x128_tn", (1, 768, 1), (98_304, 15, 50, 1))),
    (132, seen(_H100_XMMA.format("128x128x64", "1x1x1"), (56, 2, 1), (5185, 1024, 1024, 1))),
    (132, seen(_H100_XMMA.format("256x128x64", "2x1x1"), (126, 1, 1), (5184, 768, 1024, 1))),
    (132, seen("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", (2, 66, 1), (16_384, 2304, 768, 1))),
    (132, seen("nvjet_tst_128x160_64x5_2x4_v_bz_NTT", (8, 15, 1), (3072, 768, 16_384, 1))),
    (132, seen("nvjet_tst_96x64_64x8_2x4_v_bz_NTN", (8, 12, 1), (768, 768, 16_384, 1))),
    (132, seen("nvjet_qqtst_192x192_128x4_1x2_h_bz_coopB_TNN", (2, 66, 1), (16_384, 50_304, 768, 1))),
]
