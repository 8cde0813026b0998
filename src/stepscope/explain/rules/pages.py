"""What `stepscope rule CODE` prints. Codes are stable: one that was given out never means something else."""

import re

import msgspec


class RulePage(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    title: str
    meaning: str
    seen: str  # in which data, by which threshold
    saving: str  # how it is estimated, and how far off that may be
    builtin: str  # the flag of the built-in model that mends it
    own: str  # two lines for one's own code


_TEXT = """
SS001 the GPU waits for the host to launch kernels
what: Python and the framework take longer to launch a kernel than the GPU takes to run it. The queue is empty, and a
    faster kernel would only wait longer.
seen: A kernel starts late because its launch came after all work before it was done. The rule fires when a faster
    host would make the step at least 3 % shorter. Gaps of over 1 ms are not launches: see SS019.
saving: The recording is replayed with a host that needs 45 % of its time in forward and backward (25 % in inference),
    as compiled code does on an H200; CUDA graphs leave less. The optimizer's launches stay (SS007). Estimated and
    measured: 19.7 and 18.7 of 50.6 ms; 27.9 and 31.6 of 60.9; inference 11.5 and 12.3 of 16.0. The shares come from
    these three, all of a small model: another may differ by a third. A recorder slows the host down: where the step
    was timed without one too, the host is scaled to that.
built-in: --compile, or a larger --batch
own:
    model = torch.compile(model, mode="reduce-overhead")  # CUDA graphs; shapes must not change
    loader = DataLoader(data, batch_size=2 * batch)  # more work a launch

SS002 the host waits for the GPU inside the step
what: Something needs a value of the GPU's on the host: .item(), .cpu(), print(loss), if tensor:, nonzero(), a mask as
    an index. The host stops, the queue drains, and the GPU idles until new launches arrive.
seen: Calls that synchronise or copy to the host, last over 10 µs, and have launches after them in the same step.
saving: The recording is replayed without these waits. 3.1 ms were estimated where 2.4 of 59.4 ms came, a difference
    of 1 % of the step and less than the spread of its times. Where the host is slower than the GPU anyway there is
    little to gain, and the rule is silent.
built-in: --precision bf16 in place of fp16, whose gradient scaler waits once a step; nothing else in it waits
own:
    total_loss += loss.detach()  # not loss.item(): ask for the number once in a hundred steps
    x = torch.where(mask, x, 0.0)  # not x[mask], whose size only the GPU knows

SS003 chains of small operations that could be one kernel
what: Each elementwise operation, copy and sum is a kernel of its own that reads its input from memory and writes its
    result back. Fused, the intermediate results never leave the chip.
seen: Two or more such kernels in a row on one stream, of one module and phase, outside of the optimizer, not from a
    compiler.
saving: A chain is taken to cost what its longest kernel does, and at least a fifth of itself (a third where modules
    are not known): a fused kernel still reads its inputs and writes its result. These shares are assumed. Replayed
    with the host's time that SS001 has, to the same estimates and errors where the host is the limit. Where the GPU
    is, it was not measured. Overlaps with SS001, SS004, SS006 and SS008.
built-in: --compile
own:
    model = torch.compile(model)
    # or a fused layer: torch.nn.RMSNorm, F.scaled_dot_product_attention, a kernel of Liger's

SS004 attention that writes its scores to memory
what: Scores, softmax and values as separate operations move a matrix of queries by keys through memory many times. A
    fused kernel keeps it on the chip, skips the masked half, and its memory grows with the length, not its square.
seen: The parts of the built-in attention, or two batched products with a softmax between them.
saving: The time of these kernels less that of a fused one, from its FLOPs at the speed that PyTorch's own kernels
    have on an H200 (a share of the peak that grows with the number of queries; fp32 has slower kernels than bf16);
    right to a tenth for cuDNN's at lengths of 512 and 1024. Replayed; the host needs four launches a call. 48 ms were
    estimated where 39 of 146 came (53 by the fastest): afterwards the host was the limit, whose pace a step
    that the GPU limits does not show. Expect a quarter either way then.
built-in: --attention flash
own:
    out = stepscope.kernels.flash_attention(q, k, v, causal=True)  # docs/kernels.md
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # PyTorch's own
    model = AutoModel.from_config(config, attn_implementation="sdpa")  # in transformers

SS005 products in fp32 without tensor cores
what: The matrix units are idle. TF32 keeps fp32's range, rounds the inputs of products to 10 bits and is about seven
    times as fast at its peak; bf16 is twice as fast again and halves the memory traffic.
seen: Kernels of matrix products whose name says fp32 on the CUDA cores, on a device with TF32.
saving: Each product at TF32's peak, with the share of the peak that it has in fp32 now (75 % at most), or at 89 % of
    the bandwidth, whichever is slower. Replayed. 52 ms were estimated where 57 of 167 came (71 by the fastest steps):
    afterwards the host was the limit, and its pace is taken to be the slowest that fits the recording.
built-in: --precision tf32, or bf16
own:
    torch.set_float32_matmul_precision("high")
    with torch.autocast("cuda", torch.bfloat16): loss = model(x)  # or bf16

SS006 copies between layouts
what: A tensor that is transposed, permuted or expanded is copied to be contiguous, often because of a view(),
    reshape() or contiguous(), or because a gradient arrives in the other layout.
seen: Copies on the device that do not change the data type, at least 2 % of the step.
saving: All of their time, which is the most that can be had: what reads the tensor next then reads it strided.
built-in: --compile, which fuses them into their neighbours
own:
    q, k, v = qkv.unbind(2)  # choose the layout in which the next operation reads, once
    model = model.to(memory_format=torch.channels_last)  # convolutions

SS007 an optimizer of many kernels
what: AdamW needs 28 bytes a parameter: read weight, gradient and two averages, write all but the gradient. Operation
    by operation it moves about 80, in thousands of launches.
seen: Elementwise or foreach kernels in the optimizer's phase, none of them fused.
saving: The optimizer's time less 28 bytes a parameter (12 for SGD) at 89 % of the bandwidth; where the number of
    parameters is not known and the operations are Adam's, 65 % of it. Replayed: kernels one by one cost the host eight
    times what the fused one does, and kernels for many tensors the same. 9.0 ms were estimated where the optimizer's
    phase went from 19.0 to 4.6 ms, in the fastest steps from 13.9 to 4.4; the steps' own times varied by more.
built-in: --optimizer adamw-fused
own:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    # gradient clipping: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)

SS008 casts between data types
what: Under autocast, weights are cast to 16 bits anew in each step and activations wherever a 32-bit operation meets
    a 16-bit one.
seen: Copies on the device whose source and target differ in data type.
saving: All of their time. Compiling fuses the casts of activations; those of weights go only if the weights are kept
    in 16 bits, with a 32-bit copy in the optimizer.
built-in: --compile
own:
    model = torch.compile(model)  # casts become part of their neighbours
    model = model.to(torch.bfloat16)  # with an optimizer that keeps fp32 weights of its own

SS009 sizes that fit no tile
what: Products are computed in tiles and loaded 16 bytes at a time. A size that is no multiple of 8 (in 16 bits; 4 in
    TF32) forces slower loads and kernels, and one just above a multiple of the tile computes mostly padding.
seen: Products with tensor cores one of whose sizes is not such a multiple; or whose tiles, by the kernel's name,
    compute at least 15 % more than asked for.
saving: For the first, the product at the speed of the best aligned product of its kind in the recording (65 % of the
    peak where there is none), padded to a multiple of 64. For the second, the share of the padding. Replayed; none
    was estimated for a step that the host limits, and its fastest steps took the same (51.6 ms). The GPU time of the
    first is not measured: which kernels cuBLAS has for odd sizes changes with its version.
built-in: --vocab 10048 in place of 10007: the next multiple of 64
own:
    # pad sizes to multiples of 64: tokens, widths, heads
    vocab = 64 * math.ceil(vocab / 64)  # rows that no token names are never read

SS010 a last wave that is mostly empty
what: Thread blocks run in waves of as many as the GPU holds at once. 133 tiles on 132 multiprocessors take as long as
    264.
seen: Products whose tiles make one to six waves, the last of which leaves at least 10 % of all slots empty.
saving: The empty share of their time, which is the most that can be had; libraries split work over K to mend it, and
    an interplay of sizes decides. Take it as a reason to try, not as a promise.
built-in: another --batch: batch × context decides the number of tiles
own:
    # rows (batch × context) so that ceil(M / tile) × ceil(N / tile) is just below a multiple of the multiprocessors
    torch._inductor.config.max_autotune_gemm = True  # lets the compiler choose among tiles

SS011 communication that nothing hides
what: Collectives run while the device has nothing else to do. A rank that waits for a slower one is seen as
    communication as well.
seen: Time in which communication runs alone on the device, at least 2 % of the step.
saving: As much of it as there is computing in the backward pass that does not hide communication yet. How much of
    that can be had depends on the order of the gradients.
built-in: one process; nothing to hide
own:
    model = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
    with model.no_sync(): loss.backward()  # all but the last micro-batch

SS012 the GPU waits for input
what: The next batch is loaded while the GPU has nothing to do.
seen: The GPU is idle while a data loader's range is open on the host.
saving: The idle time inside of these ranges; right if loading can run beside the step.
built-in: its batch stays on the device
own:
    loader = DataLoader(data, num_workers=8, pin_memory=True, prefetch_factor=4)
    batch = batch.to("cuda", non_blocking=True)

SS013 activations computed a second time
what: Activation checkpointing throws activations away and computes them again in the backward pass: about a third
    more work, for memory.
seen: Modules that are called inside of the backward pass.
saving: The time of these kernels, replayed, and a fifth of the host's time for the other launches of their modules:
    PyTorch passes each saved tensor through Python (not with use_reentrant=True). 76 ms were estimated where 88 of
    192 came, 71 by the fastest steps; the host was the limit. Whether the memory suffices the recording does not know.
built-in: --checkpoint none
own:
    # checkpoint fewer blocks: every second one, or only those with the largest activations
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=selective)  # keep products

SS014 a few kernels take most of the time
what: Not a fault: where to look first.
seen: Three kernels, by their short names, with at least 60 % of the GPU time.
saving: None is estimated.
built-in: stepscope kernel NAME says what a kernel is
own:
    # stepscope kernel NAME says what a kernel is
    # with 60 % in three kernels, making all the others twice as fast gains 20 %

SS015 products bound by memory
what: A product does few operations a byte when one of its sizes is small. Then the bandwidth is its limit, and tensor
    cores or a lower precision of the arithmetic do not help; more rows do, at no cost in time.
seen: Matrix products whose bytes at full bandwidth take longer than their FLOPs at the peak, at least 5 % of the
    step.
saving: None is estimated: the step gets no shorter, but does more.
built-in: a larger --batch or --context
own:
    loader = DataLoader(data, batch_size=2 * batch)
    # several small products of one input as one: qkv = x @ torch.cat((wq, wk, wv)).T

SS016 a measurement to doubt
what: The machine was not in a state to measure in: throttled, shared, cold, or with a wide spread.
seen: The doubts that stepscope noted while it recorded.
saving: None: the figures may be off by as much as the doubt says.
built-in: stepscope doctor, then record again
own:
    # nvidia-smi -q -d PERFORMANCE names what holds the clocks back

SS017 copies to the GPU from pageable memory
what: Memory that is not pinned is first copied to a pinned buffer; the host stands still meanwhile.
seen: Copies named `Pageable` to the device, and the host's calls that made them.
saving: The recording is replayed without the copies' time and the host's waits. Pinned copies take time on the bus
    too, beside the kernels.
built-in: its batch stays on the device
own:
    loader = DataLoader(data, pin_memory=True)
    batch = batch.to("cuda", non_blocking=True)

SS018 the host waits for the GPU at the end of each step
what: A step that ends with loss.item() or a synchronisation starts the next one with an empty queue.
seen: A wait inside a step with no launch after it, and another step behind it.
saving: The recording is replayed without these waits.
built-in: stepscope's own waits lie between steps and are not counted
own:
    losses.append(loss.detach())  # torch.stack(losses).mean().item() once in a hundred steps
    # no torch.cuda.synchronize() in the training loop

SS019 the host is away for milliseconds
what: Nothing is launched for so long that it cannot be the cost of launching: loading, logging, saving, garbage
    collection, compiling, another process on the core.
seen: Gaps of over 1 ms on the GPU, inside of a step or at its start, that end with a late launch.
saving: The recording is replayed without the host's time before those launches.
built-in: stepscope doctor: is the machine busy?
own:
    # what the host did then: torch.profiler.profile(with_stack=True)
    gc.freeze(); gc.disable()  # if it was the collector: collect between epochs

SS020 copies between host and GPU that nothing hides
what: Weights, activations or optimizer state cross the bus while the GPU has nothing else to do.
seen: Time in which copies to or from the host run alone on the device, at least 2 % of the step.
saving: As much of it as there is other work on the GPU that hides no copies yet; on a stream of their own they can
    run beside it. What is more than that, only fewer bytes can save.
built-in: its weights and batch stay on the device
own:
    with torch.cuda.stream(copies): layer.weight.copy_(pinned, non_blocking=True)  # one layer ahead
    # keep on the GPU what is needed in each step; offload less, or in 16 bits
"""
_FIELDS = {"what": "meaning", "seen": "seen", "saving": "saving", "built-in": "builtin", "own": "own"}


def _read(text: str) -> RulePage:
    heading, *lines = text.strip().splitlines()
    code, _, title = heading.partition(" ")
    fields: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        found = re.match(r"([a-z-]+):\s?(.*)", line)
        if found and found[1] in _FIELDS:
            name = _FIELDS[found[1]]
            fields[name] = [found[2]] if found[2] else []
        else:
            fields[name].append(line.strip())
    joined = {key: ("\n" if key == "own" else " ").join(parts) for key, parts in fields.items()}
    return RulePage(code=code, title=title, **joined)


PAGES: dict[str, RulePage] = {page.code: page for page in map(_read, re.split(r"\n\n(?=SS\d)", _TEXT))}
