"""Small traces in the profiler's own layout, as text: what its events look like is what the reader is tested on."""

import gzip
import json
from pathlib import Path
from typing import Any

from stepscope.recording.rows.compiled_code import CompiledCall, CompiledGraph, save_graphs

MAIN, AUTOGRAD = 100, 200  # threads of the host
PROCESS = 77


def event(category: str, name: str, start: str, duration: str, **more: Any) -> str:
    """One complete event. Times are text, so that no digit is lost on the way into the file."""
    args = json.dumps(more.pop("args", {}))
    fields = {"ph": "X", "cat": category, "name": name, "pid": PROCESS, "tid": MAIN, **more}
    inside = json.dumps(fields)[1:-1]
    return f'{{{inside}, "ts": {start}, "dur": {duration}, "args": {args}}}'


def kernel(name: str, start: str, duration: str, correlation: int, *, stream: int = 7, **args: Any) -> str:
    details = {
        "device": 0,
        "stream": stream,
        "correlation": correlation,
        "grid": [2, 1, 1],
        "block": [128, 1, 1],
        **args,
    }
    return event("kernel", name, start, duration, pid=0, tid=stream, args=details)


def launch(start: str, duration: str, correlation: int, *, thread: int = MAIN, name: str = "cudaLaunchKernel") -> str:
    return event("cuda_runtime", name, start, duration, tid=thread, args={"correlation": correlation})


def op(name: str, start: str, duration: str, *, thread: Any = MAIN, **args: Any) -> str:
    return event("cpu_op", name, start, duration, tid=thread, args=args)


def flow(end: str, number: int, moment: str, thread: int) -> str:
    fields = {"ph": end, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": PROCESS, "tid": thread}
    return json.dumps(fields)[:-1] + f', "ts": {moment}}}'


def write_trace(path: Path, events: list[str], *, separator: str = ",\n  ", properties: str = "") -> Path:
    """`properties` go behind the list, where the profiler puts some of its own."""
    device = '{"id": 0, "name": "NVIDIA H200", "numSms": 132}'
    inside = f"[\n  {separator.join(events)}\n]"
    text = f'{{"schemaVersion": 1, "deviceProperties": [{device}],\n"traceEvents": {inside}{properties}}}\n'
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def replayed_code(folder: Path) -> list[str]:
    """The replay of compiled code, whose calls are noted in `folder`: an embedding and a GEMM of the head."""
    calls = CompiledCall("triton_poi_fused_add_0", "embedding"), CompiledCall("extern_kernels.mm", "head")
    save_graphs(folder, [CompiledGraph(key="key", is_backward=False, calls=calls)])
    return [
        event("user_annotation", "## Call CompiledFxGraph key ##", "5.000", "10.000"),
        launch("6.000", "2.000", 1, name="cudaGraphLaunch"),
        kernel("triton_poi_fused_add_0", "9.000", "1.000", 1),
        kernel("gemm", "10.000", "1.000", 1),
    ]


def training_step() -> list[str]:
    """A linear layer inside a block, its loss, its backward on autograd's thread, and an optimizer: seven kernels."""
    return [
        event("user_annotation", "ProfilerStep#5", "1000.000", "1000.000"),
        event("python_function", "nn.Module: Block_0", "1010.000", "90.000"),
        event("python_function", "nn.Module: Linear_0", "1020.000", "30.000"),
        event("python_function", "some/file.py(12): helper", "1019.000", "40.000"),
        op("aten::linear", "1021.000", "20.000", **{"Sequence number": 9, "Fwd thread id": 0}),
        op("aten::mm", "1022.000", "15.000", **{"Sequence number": 9, "Input Dims": [[4, 8], [8, 16]]}),
        launch("1025.000", "5.000", 1),
        op("aten::relu", "1060.000", "10.000", **{"Sequence number": 10, "Fwd thread id": 0}),
        launch("1062.000", "5.000", 2),
        op("aten::nll_loss", "1110.000", "10.000", **{"Sequence number": 11, "Fwd thread id": 0}),
        launch("1112.000", "5.000", 3),
        flow("s", 1, "1022.000", MAIN),
        flow("f", 1, "1300.000", AUTOGRAD),
        op(
            "autograd::engine::evaluate_function: MmBackward0",
            "1300.000",
            "50.000",
            thread=AUTOGRAD,
            **{"Sequence number": 9, "Fwd thread id": 1},
        ),
        op("aten::mm", "1310.000", "20.000", thread=AUTOGRAD),
        launch("1312.000", "5.000", 4, thread=AUTOGRAD),
        op(
            "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
            "1360.000",
            "20.000",
            thread=AUTOGRAD,
            **{"Sequence number": 18446744073709551615, "Fwd thread id": 0},
        ),
        launch("1362.000", "5.000", 5, thread=AUTOGRAD),
        event("user_annotation", "Optimizer.step#AdamW.step", "1500.000", "100.000"),
        op("aten::_foreach_add_", "1510.000", "20.000"),
        launch("1512.000", "5.000", 6),
        kernel("ampere_sgemm_128x64_tn", "1100.000", "40.125", 1),
        kernel("vectorized_relu_kernel", "1150.000", "10.001", 2),
        kernel("nll_loss_forward_reduce_cuda_kernel_2d", "1170.000", "3.000", 3),
        kernel("ampere_sgemm_128x64_nn", "1400.000", "80.000", 4),
        kernel(
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >",
            "1480.500",
            "1.500",
            5,
        ),
        kernel("void at::native::multi_tensor_apply_kernel<x>", "1600.000", "20.000", 6),
        kernel("ampere_sgemm_128x64_nt", "1005.000", "7.000", 999),
    ]


def write_ranks(folder: Path, count: int, *, is_told: bool = True) -> list[Path]:
    """Traces of ranks with two steps of a GEMM and an all-reduce each, which the last rank is late to. `is_told`: they
    contain their rank."""
    folder.mkdir(exist_ok=True)
    return [_write_rank(folder / f"trace_rank{rank}.json.gz", rank, count, is_told=is_told) for rank in range(count)]


def _write_rank(path: Path, rank: int, world: int, *, is_told: bool) -> Path:
    told = {"Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "Float"}
    told |= {"Group size": world, "Process Group Name": "0"}
    late = 40 if rank == world - 1 else rank
    events = []
    for step in range(2):
        begin = 1000 + 500 * step
        arrives = begin + 120 + late
        events += [
            event("user_annotation", f"ProfilerStep#{step}", f"{begin}.000", "499.000"),
            launch(f"{begin + 10}.000", "3.000", 2 * step),
            kernel("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", f"{begin + 20}.000", f"{100 + late}.000", 2 * step),
            launch(f"{begin + 15}.000", "3.000", 2 * step + 1),
            kernel(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                f"{arrives}.000",
                f"{begin + 200 - arrives}.000",
                2 * step + 1,
                stream=20,
                **told,
            ),
        ]
    ranks = f', "distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {world}}}' if is_told else ""
    return write_trace(path, events, properties=ranks)
