"""From operators to kernels: how many an operator launches, the bytes and FLOPs that they move and compute, and which
measured operation says how long they take.

Memory-bound operators are looked up by bytes, at the measured operation that accesses memory in the same way: same
shapes, a broadcast row or column, mixed dtypes, or strides that keep loads from being vectorized. Bytes that the last
kernels wrote are still in the L2 cache and count as warm.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from stepscope.planner.step_time.measured_times import Estimate, MeasuredTimes, NotCalibratedError, Sizes
from stepscope.planner.step_time.operator_kinds import (
    BYTES_PER_ELEMENT,
    COPIES,
    CREATIONS,
    ELEMENTWISE,
    FREE,
    GROUPED,
    INDEXING,
    LAUNCHES,
    LISTS,
    MERGED_SIZES,
    OWN,
    PRODUCTS,
    REDUCTIONS,
    ROWS,
    TWO_PASSES,
    VIEWS,
    count_calls,
    group_sizes,
    short_name,
)

if TYPE_CHECKING:
    from stepscope.planner.operation import Operation, TensorFacts

Bound = Literal["compute", "memory", "launch"]
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "bool": 1}
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}
_FUSED_ERROR = 0.2  # of kernels that a compiler makes, whose extent is a guess
_WARM_SHARE = 0.6  # of the L2 cache that survives until the next kernels


class PlannedKernel(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels of one operator: `launches` of them. `position` is that of the operator in the step."""

    position: int
    name: str  # what was measured
    phase: str
    module: str
    ns: float
    error: float  # standard deviation, as a share of `ns`
    bytes: int
    flops: int
    launches: int
    bound: Bound
    precision: str = ""  # of products and attention


class KernelModel:
    """Follows the operators of a step in order, because what is in the cache depends on what came before."""

    def __init__(self, times: MeasuredTimes, *, tf32: bool = False) -> None:
        self._times = times
        self._fp32 = "tf32" if tf32 else "fp32"
        self._storage_bytes: dict[int, int] = {}
        self._stepped: set[tuple[int, Sizes]] = set()  # views that skip elements
        self._cached: OrderedDict[int, int] = OrderedDict()
        self._cached_total = 0
        self._capacity = _WARM_SHARE * times.calibration.l2_bytes

    def kernels_of(self, position: int, operation: "Operation") -> PlannedKernel | None:
        """The kernels of the next operator, or None if it launches none."""
        name = short_name(operation.name)
        if name in VIEWS or name in FREE or not (operation.inputs or operation.outputs):
            self._follow_view(name, operation)
            return None
        if all(fact.storage < 0 for fact in (*operation.inputs, *operation.outputs)):
            return None
        estimate, measured, flops = self._estimate(name, operation)
        precision = self._precision(operation.inputs) if flops else ""
        moved = self._bytes(operation.inputs) + self._written(operation)
        self._remember(operation)
        bound: Bound = "compute" if flops and flops / max(1, moved) > 150 else "memory"
        launches = max(LAUNCHES.get(name, 1), count_calls(operation))
        if estimate.ns < 1.5 * launches * self._times.calibration.constants.get("tiny_kernel_in_stream_ns", 2000.0):
            bound = "launch"
        return PlannedKernel(
            position=position,
            name=measured,
            phase=operation.phase,
            module=operation.module,
            ns=estimate.ns,
            error=estimate.error,
            bytes=moved,
            flops=flops,
            launches=launches,
            bound=bound,
            precision=self._fp32 if precision == "fp32" else precision,
        )

    def pass_over(self, operation: "Operation") -> None:
        """Follow an operator that a compiler makes a part of a kernel."""
        self._follow_view(short_name(operation.name), operation)
        self._remember_sizes(operation)

    def fused(
        self, position: int, operation: "Operation", reads: Mapping[int, int], writes: Mapping[int, int]
    ) -> PlannedKernel:
        """A kernel of a compiled step that moves these bytes of storages, as fast as an addition of two tensors."""
        written = sum(writes.values())
        moved = sum(reads.values()) + written
        sizes = (max(1, moved // 12),)
        found = self._times.rows("add", "fp32", "cold", sizes, 12)
        ns = self._warm_up(found.ns, self._times.rows("add", "fp32", "warm", sizes, 12).ns, self._warm(reads, written))
        for storage, size in (*reads.items(), *writes.items()):
            self._keep_cached(storage, size)
        return PlannedKernel(
            position=position,
            name="fused",
            phase=operation.phase,
            module=operation.module,
            ns=ns,
            error=max(_FUSED_ERROR, found.error),
            bytes=moved,
            flops=0,
            launches=1,
            bound="memory" if moved > 2**20 else "launch",
        )

    def product_ns(self, operation: "Operation") -> float:
        """The time of a product, whatever is in the cache."""
        return self._product(short_name(operation.name), operation)[0].ns

    def copy_ns(self, size: int) -> float:
        """The time to copy this many bytes."""
        return self._times.rows("clone", "fp32", "cold", (max(1, size // 4),), 8).ns

    def pad_ns(self, fact: "TensorFacts", padded: int) -> float:
        """The time to copy a matrix to zeros of `padded` elements."""
        precision, itemsize = ("fp32", 4) if fact.dtype == "float32" else ("bf16", 2)
        copy = "clone" if fact.contiguous else "transpose_copy"
        copied = self._times.rows(copy, precision, "cold", (math.prod(fact.shape),), 2 * itemsize)
        return copied.ns + self._times.rows("zero_", precision, "cold", (padded,), itemsize).ns

    # --- Which measurement -------------------------------------------------------------------------------------------

    def _estimate(self, name: str, operation: "Operation") -> tuple[Estimate, str, int]:
        """The time, the name of what was measured, and the FLOPs."""
        if not operation.name.startswith(("aten.", "stepscope.", "prims.")):
            raise NotCalibratedError(f"the calibration has no times of `{operation.name}`")
        if name == GROUPED:
            return self._grouped(operation)
        if name in PRODUCTS:
            return self._product(name, operation)
        if "attention" in name or name.startswith("flash"):
            return self._attention(name, operation)
        if operation.name.startswith("stepscope."):
            return self._own(name, operation), name, 0
        if name in LISTS or name.startswith("_foreach"):
            return self._list(name, operation), name, 0
        if name in INDEXING and len(operation.inputs) > 1:
            return self._indexing(name, operation), name, 0
        if name == "nll_loss_forward":
            return self._gather(operation), "embedding", 0
        if name == "_safe_softmax":
            return self._safe_softmax(operation), "softmax", 0
        if name in ROWS:
            return self._rows(name, operation), ROWS[name][0], 0
        if name in REDUCTIONS:
            return self._reduction(name, operation)
        return self._elementwise(name, operation)

    def _precision(self, facts: Iterable["TensorFacts"]) -> str:
        """The measured dtype closest to the first floating-point tensor."""
        for fact in facts:
            if fact.dtype in ("float32", "bfloat16", "float16"):
                return _PRECISIONS.get(fact.dtype, "fp32")
        return "fp32"

    def _product(self, name: str, operation: "Operation") -> tuple[Estimate, str, int]:
        left, right = operation.inputs[-2:]
        merged = operation.arguments.get(MERGED_SIZES)
        if isinstance(merged, tuple):
            left = operation.inputs[0]
        has_bias = name.startswith(("addmm", "_addmm", "baddbmm"))
        precision = self._precision(operation.inputs)
        precision = self._fp32 if precision == "fp32" else precision
        layout = ("n" if left.contiguous else "t") + ("n" if right.contiguous else "t")
        layout = "nn" if layout == "tt" else layout
        if len(right.shape) == 1:  # a vector is a matrix with one column
            sizes: Sizes = (math.prod(left.shape[:-1]), 1, left.shape[-1])
            return self._times.product("mm", precision, layout, sizes), "mm", 2 * math.prod(sizes)
        sizes = merged if isinstance(merged, tuple) else (left.shape[-2], right.shape[-1], left.shape[-1])
        if len(left.shape) == 3:
            batch = left.shape[0]
            if batch == 1:
                estimate = self._times.product("mm", precision, layout, sizes)
            else:
                estimate = self._times.product("bmm", precision, layout, (batch, *sizes))
            return estimate, "bmm", 2 * batch * math.prod(sizes)
        measured = "addmm" if has_bias else "mm"
        return self._times.product(measured, precision, layout, sizes), measured, 2 * math.prod(sizes)

    def _grouped(self, operation: "Operation") -> tuple[Estimate, str, int]:
        """The products of all groups: as a batch if they are one kernel, otherwise one after the other."""
        left, right = operation.inputs[:2]
        precision = self._precision(operation.inputs)
        precision = self._fp32 if precision == "fp32" else precision
        layout = ("n" if left.contiguous else "t") + ("n" if right.contiguous else "t")
        groups, *sizes = group_sizes(operation)
        flops = 2 * groups * math.prod(sizes)
        if count_calls(operation) == 1 and groups > 1:
            return self._times.product("bmm", precision, layout, (groups, *sizes)), "bmm", flops
        one = self._times.product("mm", precision, layout, tuple(sizes))
        return Estimate(groups * one.ns, one.error), "mm", flops

    def _attention(self, name: str, operation: "Operation") -> tuple[Estimate, str, int]:
        is_backward = "backward" in name
        q, k = _queries_and_keys(operation)
        sizes = (q.shape[0], q.shape[1], k.shape[1], max(q.shape[2], k.shape[2]), q.shape[3])
        causal = bool(operation.arguments.get("is_causal", operation.arguments.get("causal", False)))
        backend = next((one for one in ("cudnn", "efficient", "flash") if one in name), "flash")
        plain = "stepscope-flash" if operation.name.startswith("stepscope") else f"sdpa-{backend}"
        has_mask, has_dropout = _has_mask(operation, q, k), bool(operation.arguments.get("dropout_p"))
        measured = f"{plain}{'-masked' * has_mask or '-dropout' * has_dropout}"
        precision = self._precision(operation.inputs)
        passing = "backward" if is_backward else "forward"
        flops = (5 if is_backward else 2) * 2 * q.shape[0] * q.shape[1] * sizes[3] ** 2 * q.shape[3] // (1 + causal)
        slower = self._dropout_ratio(plain, precision, passing, sizes) if has_mask and has_dropout else 1.0
        for operation_name, dtype, mask, factor in _attention_fallbacks(measured, plain, precision, causal):
            if self._times.has(operation_name, dtype, f"{mask} {passing}"):
                found = self._times.attention(operation_name, dtype, f"{mask} {passing}", sizes)
                return Estimate(found.ns * factor * slower, found.error), measured, flops
        return (
            self._times.attention(measured, precision, f"causal {passing}", sizes),
            measured,
            flops,
        )  # says what lacks

    def _dropout_ratio(self, plain: str, precision: str, passing: str, sizes: Sizes) -> float:
        """How much slower attention is with dropout. Dropout and a mask were measured, but not both together."""
        for variant in (f"{mask} {passing}" for mask in ("causal", "full")):
            if self._times.has(f"{plain}-dropout", precision, variant) and self._times.has(plain, precision, variant):
                with_dropout = self._times.attention(f"{plain}-dropout", precision, variant, sizes).ns
                return with_dropout / self._times.attention(plain, precision, variant, sizes).ns
        return 1.0

    def _list(self, name: str, operation: "Operation") -> Estimate:
        """A list of tensors. Operators in place return nothing, so what they write is known from their name."""
        measured, operands = LISTS.get(name, "foreach_mul"), list_operands(operation.name)
        if measured == "foreach_add" and operands == 1:  # a scalar, not a second list
            measured = "foreach_mul"
        count = max(1, len(operation.inputs) // operands)
        elements = self._bytes(operation.inputs[:count]) // 4
        return self._times.rows(measured, "fp32", "", (count, max(1, elements // count)), 4 * list_passes(measured))

    def _indexing(self, name: str, operation: "Operation") -> Estimate:
        measured = INDEXING[name]
        rows = max(operation.inputs, key=lambda fact: math.prod(fact.shape))
        precision = "bf16" if self._precision(operation.inputs) != "fp32" else "fp32"
        out = operation.outputs[0] if operation.outputs else rows
        ids = next((fact for fact in operation.inputs if "int" in fact.dtype), operation.inputs[-1])
        width = out.shape[-1] if out.shape else 1
        table = out if measured in ("embedding_backward", "index_add", "index_put") else operation.inputs[0]
        vocab = max(1, math.prod(table.shape) // max(1, width))
        found = self._times.indexing(measured, precision, (max(1, math.prod(ids.shape)), vocab, max(1, width)))
        if measured in ("index_add", "index_put"):  # measured with the zeros that they add to
            zeros = self._times.rows("zero_", precision, "cold", (vocab * width,), 4 if precision == "fp32" else 2)
            return Estimate(max(2000.0, found.ns - zeros.ns), found.error)
        return found

    def _gather(self, operation: "Operation") -> Estimate:
        """One element of each row, whatever their length."""
        rows, columns = operation.inputs[0].shape[0], operation.inputs[0].shape[-1]
        precision = "fp32" if self._precision(operation.inputs) == "fp32" else "bf16"
        return self._times.indexing("embedding", precision, (rows, columns, 1))

    def _rows(self, name: str, operation: "Operation") -> Estimate:
        measured, passes = ROWS[name]
        fact = max(operation.inputs, key=lambda one: math.prod(one.shape))
        precision = "fp32" if self._precision([fact]) == "fp32" else "bf16"
        itemsize = 4 if precision == "fp32" else 2
        columns = fact.shape[-1] if fact.shape else 1
        read = self._bytes(operation.inputs) if passes > 1 else 0  # with one pass, it only writes
        rows = max(1, round((read + self._written(operation)) / (passes * itemsize * columns)))
        return self._times.rows(measured, precision, "", (rows, columns), passes * itemsize)

    def _safe_softmax(self, operation: "Operation") -> Estimate:
        """Softmax that returns zeros for rows of which everything is masked. Three more kernels find what is masked,
        then the rows, and copy the result."""
        softmax, fact = self._rows("_safe_softmax", operation), operation.inputs[0]
        precision, itemsize = ("fp32", 4) if self._precision([fact]) == "fp32" else ("bf16", 2)
        elements, columns = math.prod(fact.shape), fact.shape[-1]
        written = elements * (itemsize + 1) // (2 * itemsize)  # a byte for each element
        masked = self._times.rows("mul_scalar", precision, "cold", (written,), 2 * itemsize)
        rows = self._times.rows("amax_columns", "bf16", "", (elements // columns, columns), 2)
        copied = self._times.rows("mul_scalar", precision, "cold", (elements,), 2 * itemsize)
        return Estimate(softmax.ns + masked.ns + rows.ns + copied.ns, softmax.error)

    def _reduction(self, name: str, operation: "Operation") -> tuple[Estimate, str, int]:
        fact = operation.inputs[0]
        precision = "fp32" if self._precision([fact]) == "fp32" else "bf16"
        itemsize = 4 if precision == "fp32" else 2
        total = max(1, self._bytes([fact]) // itemsize)
        kept = max(1, math.prod(operation.outputs[0].shape)) if operation.outputs else 1
        if kept == 1:
            return self._times.rows("sum_all", precision, "", (max(1, total // 1024), 1024), itemsize), "sum_all", 0
        dims = operation.arguments.get("dim", ())
        last = fact.shape and any(
            one in (-1, len(fact.shape) - 1) for one in (dims if isinstance(dims, tuple) else (dims,))
        )
        if last:
            measured = f"{REDUCTIONS[name]}_columns"
            columns = max(1, total // kept)
            return self._times.rows(measured, precision, "", (kept, columns), itemsize), measured, 0
        return self._times.rows("sum_rows", precision, "", (max(1, total // kept), kept), itemsize), "sum_rows", 0

    def _own(self, name: str, operation: "Operation") -> Estimate:
        if name == "adamw":
            count = len(operation.inputs) // 4
            elements = self._bytes(operation.inputs) // 16
            return self._times.rows("own_adamw", "fp32", "", (count, max(1, elements // count)), 28)
        measured, passing = OWN.get(name, ("own_rms_norm", "forward"))
        moved = self._bytes(operation.inputs) + self._written(operation)
        fact = max((*operation.inputs, *operation.outputs), key=lambda one: math.prod(one.shape))
        columns = fact.shape[-1] if fact.shape else 1
        passes = {"own_add_rms_norm": 4, "own_swiglu_packed": 1.5, "own_cross_entropy": 1}.get(measured, 2)
        passes += (passing == "backward") * (1 if passes >= 2 else passes)
        rows = max(1, round(moved / (2 * passes * columns)))
        return self._times.rows(measured, "bf16", passing, (rows, columns), round(2 * passes))

    # --- Elementwise -------------------------------------------------------------------------------------------------

    def _elementwise(self, name: str, operation: "Operation") -> tuple[Estimate, str, int]:
        inputs = [fact for fact in operation.inputs if fact.storage >= 0]
        measured = self._resembling(name, operation, inputs)
        precision = "fp32" if self._precision((*inputs, *operation.outputs)) == "fp32" else "bf16"
        itemsize = 4 if precision == "fp32" else 2
        passes, extra = BYTES_PER_ELEMENT.get(measured, TWO_PASSES)
        moved = self._bytes(inputs) + self._written(operation)
        if measured in ("slice_backward", "select_backward", "masked_fill"):  # what is written twice
            moved += self._written(operation)
        elements = max(1, round(moved / (passes * itemsize + extra)))
        base_bytes = round(passes * itemsize + extra)
        cold = self._times.rows(measured, precision, "cold", (elements,), base_bytes)
        warm_share = self._warm_share(operation)
        if not warm_share or not self._times.has(measured, precision, "warm"):
            return cold, measured, 0
        warm = self._times.rows(measured, precision, "warm", (elements,), base_bytes)
        return Estimate(self._warm_up(cold.ns, warm.ns, warm_share), cold.error), measured, 0

    def _warm_up(self, cold_ns: float, warm_ns: float, warm_share: float) -> float:
        return warm_share * min(warm_ns, cold_ns) + (1 - warm_share) * cold_ns

    def _resembling(self, name: str, operation: "Operation", inputs: Sequence["TensorFacts"]) -> str:
        """The measured operation that accesses memory like this one."""
        out = operation.outputs[0] if operation.outputs else inputs[0]
        size = math.prod(out.shape)
        large = [fact for fact in inputs if math.prod(fact.shape) * 4 > size]
        is_stepped = any((fact.storage, fact.shape) in self._stepped for fact in inputs)
        is_strided = any(not fact.contiguous for fact in large) and not all(
            not fact.contiguous for fact in (*large, out)
        )
        if name in COPIES:
            return _resembling_copy(name, operation, inputs, is_stepped=is_stepped, is_strided=is_strided)
        if name in CREATIONS:
            return "triu" if name in ("triu", "tril") else "zero_"
        if name in ("slice_backward", "select_backward"):
            return "select_backward" if operation.arguments.get("step", 1) != 1 else "slice_backward"
        if name == "masked_fill":
            return "masked_fill"
        smaller = [fact for fact in inputs if 1 < math.prod(fact.shape) < size]
        if is_stepped:
            return "mul_even_row" if smaller else "mul_even"
        dtypes = {fact.dtype for fact in large if "float" in fact.dtype}
        if len(dtypes) > 1:
            return "add_mixed" if name.startswith("add") else "mul_mixed"
        if is_strided:
            return "mul_heads" if len(inputs) > 1 else "split_heads"
        if smaller and name not in ("where", "masked_fill_"):
            is_mixed = bool(dtypes) and any(fact.dtype not in dtypes for fact in smaller if "float" in fact.dtype)
            return _resembling_broadcast(name, smaller[0], is_mixed=is_mixed)
        binary, unary = ELEMENTWISE.get(name, ("mul", "mul_scalar"))
        if name == "pow":
            exponent = operation.arguments.get("exponent")
            return "clone" if exponent == 1 else "pow" if exponent == 2 else "pow3"
        if name.startswith("gelu") and operation.arguments.get("approximate") == "tanh":
            return "gelu_tanh_backward" if len(inputs) > 1 else "gelu_tanh"
        return binary if len(large) > 1 or name in ("where",) else unary

    # --- Memory ------------------------------------------------------------------------------------------------------

    def _bytes(self, facts: Iterable["TensorFacts"]) -> int:
        """Bytes of tensors, each once, and never more than their memory has: an expanded tensor repeats it."""
        seen: dict[tuple[int, Sizes], int] = {}
        for fact in facts:
            if fact.storage >= 0:
                size = math.prod(fact.shape) * ITEM_BYTES.get(fact.dtype, 4)
                seen[fact.storage, fact.shape] = min(size, self._storage_bytes.get(fact.storage, size))
        return sum(seen.values())

    def _written(self, operation: "Operation") -> int:
        return self._bytes(operation.outputs)

    def _follow_view(self, name: str, operation: "Operation") -> None:
        if name == "select" or (name == "slice" and operation.arguments.get("step", 1) != 1):
            self._stepped |= {(fact.storage, fact.shape) for fact in operation.outputs}
        elif name in FREE:
            self._remember_sizes(operation)
        else:
            stepped = any((fact.storage, fact.shape) in self._stepped for fact in operation.inputs)
            self._stepped |= {(fact.storage, fact.shape) for fact in operation.outputs} if stepped else set()

    def _remember_sizes(self, operation: "Operation") -> None:
        for fact in operation.outputs:
            if fact.storage >= 0:
                size = math.prod(fact.shape) * ITEM_BYTES.get(fact.dtype, 4)
                self._storage_bytes.setdefault(fact.storage, size)

    def _remember(self, operation: "Operation") -> None:
        """Put what the operator read and wrote into the cache, the last one on top."""
        self._remember_sizes(operation)
        for fact in (*operation.inputs, *operation.outputs):
            if fact.storage >= 0:
                size = math.prod(fact.shape) * ITEM_BYTES.get(fact.dtype, 4)
                self._keep_cached(fact.storage, min(size, self._storage_bytes.get(fact.storage, size)))

    def _keep_cached(self, storage: int, size: int) -> None:
        self._cached_total += size - self._cached.get(storage, 0)
        self._cached[storage] = size
        self._cached.move_to_end(storage)
        while len(self._cached) > 1 and self._cached_total > 2 * self._capacity:
            self._cached_total -= self._cached.popitem(last=False)[1]

    def _warm_share(self, operation: "Operation") -> float:
        """The share of an operator's bytes that are in the cache."""
        facts = {one.storage: one for one in operation.inputs if one.storage >= 0}
        return self._warm({storage: self._bytes([fact]) for storage, fact in facts.items()}, self._written(operation))

    def _warm(self, reads: Mapping[int, int], written: int) -> float:
        """The same of bytes that are read and written. What is written goes to the cache if it is small."""
        warm = sum(min(size, self._cached_bytes(storage)) for storage, size in reads.items())
        total = sum(reads.values()) + written
        return (warm + max(0.0, min(written, self._capacity / 2 - warm / 4))) / max(1, total)

    def _cached_bytes(self, storage: int) -> float:
        """How much of a tensor is still in the cache: what was used since then has pushed out the rest."""
        if storage not in self._cached:
            return 0.0
        since = 0
        for other in reversed(self._cached):
            if other == storage:
                break
            since += self._cached[other]
        return max(0.0, min(self._cached[storage], self._capacity - since))


def _resembling_copy(
    name: str, operation: "Operation", inputs: Sequence["TensorFacts"], *, is_stepped: bool, is_strided: bool
) -> str:
    if name == "stack":
        return "stack_last" if operation.arguments.get("dim") == -1 else "cat"
    if name == "cat":
        return "cat_halves" if any(not fact.contiguous for fact in inputs) else "cat"
    if name in ("repeat", "repeat_interleave"):
        return "repeat_heads"
    dtypes = {fact.dtype for fact in (*inputs, *operation.outputs)}
    if len(dtypes) > 1:
        return "cast"
    if is_stepped:
        return "mul_even"
    return "split_heads" if is_strided or any(not fact.contiguous for fact in inputs) else "clone"


def _resembling_broadcast(name: str, smaller: "TensorFacts", *, is_mixed: bool) -> str:
    """Operators with an input that is repeated for every row or every column."""
    if smaller.shape[-1] > 1:
        return "mul_row_mixed" if is_mixed else "mul_row"
    if is_mixed:
        return "sub_column_mixed"
    return "div_column" if name.startswith("div") else "mul_column"


def _queries_and_keys(operation: "Operation") -> tuple["TensorFacts", "TensorFacts"]:
    """The first two different roles among the inputs with four dimensions; backward has the gradient in front."""
    tensors = [fact for fact in operation.inputs if len(fact.shape) == 4]
    start = 1 if "backward" in operation.name else 0
    return tensors[start], tensors[start + 1]


def _has_mask(operation: "Operation", queries: "TensorFacts", keys: "TensorFacts") -> bool:
    """Whether one of the inputs after queries, keys and values, and in backward after their result, has a column per
    key."""
    others = operation.inputs[5 if "backward" in operation.name else 3 :]
    lengths = {(queries.shape[2], keys.shape[2]), (1, keys.shape[2])}
    return any(len(fact.shape) >= 2 and fact.shape[-2:] in lengths for fact in others)


def _attention_fallbacks(
    measured: str, plain: str, precision: str, causal: bool
) -> Iterator[tuple[str, str, str, float]]:
    """What was measured, from the same problem to similar ones, each with the factor of its time."""
    mask = "causal" if causal else "full"
    other, factor = ("full", 0.6) if causal else ("causal", 1.7)
    for name in (measured, plain, "sdpa-cudnn", "sdpa-flash", "sdpa-efficient"):
        for dtype in (precision, "bf16" if precision == "fp16" else precision):
            yield name, dtype, mask, 1.0
            yield name, dtype, other, factor


def list_passes(measured: str) -> int:
    """How often a list operation reads or writes each of its elements."""
    return {"fused_adamw": 7, "foreach_mul": 2, "foreach_div": 2, "foreach_sqrt": 2, "foreach_norm": 1}.get(
        measured, {"foreach_zero": 1, "foreach_addcmul": 3, "foreach_addcdiv": 4}.get(measured, 3)
    )


def list_operands(name: str) -> int:
    """How many lists an operator takes: `aten._foreach_add_.List` takes two, all of the same length."""
    short, overload = short_name(name), name.rpartition(".")[2]
    if short.startswith("_fused_adam"):
        return 5  # with the step counts
    if "addcmul" in short or "addcdiv" in short:
        return 3
    return 2 if overload == "List" or "lerp" in short or "copy" in short else 1
