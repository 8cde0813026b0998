"""What to do about exposed communication, by strategy."""

from dataclasses import dataclass
from typing import Literal

from stepscope.explain.rules.rule import GROW_BATCH, THROUGHPUT

StrategyName = Literal["DDP", "FSDP", "sharded optimizer", "tensor parallel", "all-to-all", "pipeline", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyAdvice:
    seen: str  # what shows the strategy
    action: str
    paste: str


_DDP = "gradients are all-reduced in backward (DDP)"
ADVICE: dict[StrategyName, StrategyAdvice] = {
    "DDP": StrategyAdvice(
        seen=_DDP,
        action="Start the all-reduces earlier, with smaller buckets in the order of backward",
        paste=(
            "model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=10, static_graph=True)\n"
            "# static_graph: if every step uses the same parameters"
        ),
    ),
    "FSDP": StrategyAdvice(
        seen="weights are all-gathered in forward and backward (FSDP, ZeRO-3)",
        action="Gather the weights of the next block while the current one computes, and wrap larger units",
        paste=(
            "for block, following in zip(blocks, blocks[1:]):  # after fully_shard(block)\n"
            "    block.set_modules_to_forward_prefetch([following])\n"
            "    following.set_modules_to_backward_prefetch([block])\n"
            "# FullyShardedDataParallel(model, forward_prefetch=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)"
        ),
    ),
    "sharded optimizer": StrategyAdvice(
        seen="gradients are reduce-scattered and weights all-gathered around the optimizer (ZeRO-1, ZeRO-2)",
        action="Start the reduce-scatter during backward, and wait for the all-gather in the next forward",
        paste=(
            "parameter.register_post_accumulate_grad_hook(start_reduce_scatter)  # async_op=True\n"
            "# DeepSpeed: overlap_comm; Megatron-LM: --overlap-grad-reduce --overlap-param-gather"
        ),
    ),
    "tensor parallel": StrategyAdvice(
        seen="activations are exchanged within layers (tensor or sequence parallel)",
        action="Overlap these collectives with their GEMMs (async tensor parallelism), or use fewer ranks per layer",
        paste=(
            "torch._inductor.config._micro_pipeline_tp = True  # before torch.compile(model)\n"
            "torch.distributed._symmetric_memory.enable_symm_mem_for_group(mesh['tp'].get_group().group_name)"
        ),
    ),
    "all-to-all": StrategyAdvice(
        seen="tokens or embeddings are exchanged all-to-all (expert or embedding parallel)",
        action="Overlap the all-to-all with work that does not need it, or send fewer bytes",
        paste=(
            "work = torch.distributed.all_to_all_single(received, sent.bfloat16(), async_op=True)\n"
            "...  # work that does not need it: dense layers, shared experts, the input of the next batch\n"
            "work.wait()"
        ),
    ),
    "pipeline": StrategyAdvice(
        seen="activations are sent from stage to stage (pipeline parallel)",
        action="Use more micro-batches, or an interleaved schedule",
        paste=(
            "schedule = torch.distributed.pipelining.ScheduleInterleaved1F1B(stages, n_microbatches=4 * num_stages)"
        ),
    ),
    "unknown": StrategyAdvice(
        seen="the collectives do not show a known strategy",
        action="Start collectives as soon as their input is ready, and wait as late as possible",
        paste="work = torch.distributed.all_reduce(tensor, async_op=True)\n...  # other work\nwork.wait()",
    ),
}
# Where the classes of the run or its ranges tell which implementation it is.
FSDP1 = StrategyAdvice(
    seen="weights are all-gathered in forward and backward (FullyShardedDataParallel, FSDP1)",
    action="Prefetch the weights of the next unit in both passes, wrap larger units, or change to `fully_shard`",
    paste=(
        "from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel\n"
        "model = FullyShardedDataParallel(\n"
        "    model, auto_wrap_policy=policy, forward_prefetch=True, limit_all_gathers=True,\n"
        "    backward_prefetch=BackwardPrefetch.BACKWARD_PRE, use_orig_params=True\n"
        ")"
    ),
)
FSDP2 = StrategyAdvice(
    seen="weights are all-gathered in forward and backward (fully_shard, FSDP2)",
    action="Gather the weights of the next block while the current one computes, and shard larger units",
    paste=(
        "for block, following in zip(blocks, blocks[1:]):  # after fully_shard(block)\n"
        "    block.set_modules_to_forward_prefetch([following])\n"
        "    following.set_modules_to_backward_prefetch([block])\n"
        "# fully_shard(block, reshard_after_forward=False): gathers once per step, if memory allows"
    ),
)
ZERO_OPTIMIZER = StrategyAdvice(
    seen="each rank updates a shard of the weights and sends it to the others (ZeroRedundancyOptimizer, ZeRO-1)",
    action="Send updated weights in buckets, and overlap them with backward",
    paste=(
        "optimizer = torch.distributed.optim.ZeroRedundancyOptimizer(\n"
        "    model.parameters(), optimizer_class=torch.optim.AdamW, lr=lr, parameters_as_bucket_view=True\n"
        ")\n"
        "# overlap_with_ddp=True, with model.register_comm_hook(None, hook_with_zero_step(hook, model, optimizer))"
    ),
)
DEEPSPEED = StrategyAdvice(
    seen="gradients are reduce-scattered and weights all-gathered (DeepSpeed ZeRO)",
    action="Overlap communication with backward, and use larger buckets",
    paste='"zero_optimization": {"overlap_comm": true, "contiguous_gradients": true, "reduce_bucket_size": 5e8}',
)
# For DDP, what helps depends on its messages.
LARGER_BUCKETS = StrategyAdvice(
    seen=_DDP,
    action="Use larger gradient buckets",
    paste="model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)",
)
FEWER_BYTES = StrategyAdvice(
    seen=_DDP,
    action="Send gradients in bf16, half the bytes of fp32, and compare the loss",
    paste=(
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook\n"
        "model.register_comm_hook(None, bf16_compress_hook)"
    ),
)
_NO_SYNC = "with model.no_sync():  # in all but the last micro-batch of an update\n    loss.backward()"
FEWER_MESSAGES = StrategyAdvice(
    seen=_DDP, action=f"Reduce gradients once per several micro-batches, {THROUGHPUT}", paste=_NO_SYNC
)
# For a run that already accumulates gradients.
REDUCE_ONCE = StrategyAdvice(
    seen=_DDP, action="Reduce gradients in the last micro-batch of an update only", paste=_NO_SYNC
)
# If communication takes most of the step, whatever the strategy.
SEND_LESS = StrategyAdvice(
    seen="",
    action=f"Send bf16 instead of fp32, or compute more per collective with a larger batch, {THROUGHPUT}",
    paste=GROW_BATCH,
)
