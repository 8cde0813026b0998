"""Operators of made-up steps, as a simulation would record them."""

from stepscope.planner.operation import Operation, TensorFacts


def tensor(*shape: int, storage: int, dtype: str = "float32", contiguous: bool = True) -> TensorFacts:
    return TensorFacts(shape, dtype, contiguous, storage)


def call(
    name: str,
    inputs: tuple[TensorFacts, ...],
    outputs: tuple[TensorFacts, ...],
    phase: str = "forward",
    module: str = "block",
    **arguments: object,
) -> Operation:
    return Operation(f"aten.{name}", phase, module, inputs, outputs, arguments)  # type: ignore[arg-type]


def half(*shape: int, storage: int, contiguous: bool = True) -> TensorFacts:
    return tensor(*shape, storage=storage, dtype="bfloat16", contiguous=contiguous)


def product(phase: str = "forward", *, m: int = 8192, storage: int = 10, dtype: str = "bfloat16") -> Operation:
    left, right = tensor(m, 2048, storage=storage, dtype=dtype), tensor(2048, 2048, storage=2, dtype=dtype)
    return call("mm.default", (left, right), (tensor(m, 2048, storage=storage + 1, dtype=dtype),), phase)


def addition(elements: int, *, storage: int = 20, phase: str = "forward") -> Operation:
    inputs = tensor(elements, storage=storage), tensor(elements, storage=storage + 1)
    return call("add.Tensor", inputs, (tensor(elements, storage=storage + 2),), phase)


def chain(length: int, *, elements: int = 2**22, phase: str = "forward", first: int = 100) -> list[Operation]:
    """Elementwise operators, each of which reads what the one before it wrote."""
    return [
        call(
            "mul.Tensor",
            (tensor(elements, storage=first + number),),
            (tensor(elements, storage=first + number + 1),),
            phase,
            other=2.0,
        )
        for number in range(length)
    ]
