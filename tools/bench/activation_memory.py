#!/usr/bin/env python3
"""Peak memory and step time of recompute and activation offload, each variant in a process of its own.

A stack of small blocks whose inputs outweigh their weights, on the CPU, with the disk tier. It shows what each step of
the technique saves: no recompute, recompute, inputs offloaded (one buffer), inputs offloaded (two buffers). All must
end with the same gradients bit for bit. It is not a model: use it for memory and overlap, not for tokens per second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_glue.activation import ActivationManager, ActivationPlan
from megatron_glue.types import ForwardContext, PackedSequence

MIB = 1 << 20
VARIANTS = {
    "none": {},
    "recompute": {"recompute": True},
    "offload-1": {"recompute": True, "offload": True},
    "offload-2": {"recompute": True, "offload": True, "double_buffer": True},
}
EXAMPLE = """example:
  python tools/bench/activation_memory.py --layers 12 --tokens 8192 --dim 512 --folder /var/tmp/offload

peak      highest resident memory minus that before the first step
limit     what must be there at least: inputs of all blocks (recompute), or of two buffers (offload-2)
wait      time per step that backward stood still for reloads
hidden    hidden copy time / min(copy, compute)
The C allocator is told to return memory of 1 MiB and more to the system, as otherwise its free lists blur the peak."""


class Block(nn.Module):
    """x + W2 gelu(W1 norm(x)), hidden size D."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Run the block on [T, D]."""
        return x_TD + self.down(F.gelu(self.up(self.norm(x_TD))))


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Run one variant in this process."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(arguments.dim) for _ in range(arguments.layers))
    folder = Path(arguments.folder)
    manager = ActivationManager(ActivationPlan(**VARIANTS[arguments.child], offload_dir=folder), "cpu")
    context = ForwardContext(PackedSequence.from_lengths([arguments.tokens]))
    x_TD = torch.randn(arguments.tokens, arguments.dim)
    blocks.zero_grad(set_to_none=False)
    before_bytes = _peak_bytes()
    step_ms = []
    for step in range(arguments.steps + 1):
        start = time.perf_counter()
        manager.begin_step()
        for param in blocks.parameters():
            param.grad = None
        h_TD = x_TD.clone().requires_grad_()
        for block in blocks:
            h_TD = manager.run_block(block, h_TD, context)
        manager.end_forward()
        loss = h_TD.square().mean()
        del h_TD
        loss.backward()
        manager.reset()
        if step > 0:
            step_ms.append(1e3 * (time.perf_counter() - start))
        else:
            manager.reset_stats()  # the first step also allocates buffers and the file
    digest = hashlib.sha256()
    for param in blocks.parameters():
        assert param.grad is not None
        digest.update(param.grad.numpy().tobytes())
    stats = manager.stats()
    result = {
        "variant": arguments.child,
        "peak_mib": (_peak_bytes() - before_bytes) / MIB,
        "step_ms": sum(step_ms) / len(step_ms),
        "wait_ms": stats.reload_wait_ms / arguments.steps,
        "copy_ms": stats.copy_ms / arguments.steps,
        "overlap_efficiency": stats.overlap_efficiency,
        "gradients": digest.hexdigest(),
        "chosen": manager.describe(),
        "stats": asdict(stats),
    }
    manager.close()
    return result


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_variant(variant: str, arguments: argparse.Namespace, folder: str) -> dict[str, object]:
    """Run one variant in a new process, so that its peak is its own."""
    command = ["env", f"MALLOC_MMAP_THRESHOLD_={MIB}", sys.executable, __file__, "--child", variant, "--folder", folder]
    for name in ("layers", "tokens", "dim", "steps", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (our own file)
    if done.returncode != 0:
        sys.exit(f"variant {variant} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def print_table(results: list[dict[str, object]], arguments: argparse.Namespace) -> None:
    """Print one line per variant."""
    input_mib = 4 * arguments.tokens * arguments.dim / MIB
    print(
        f"{arguments.layers} blocks, inputs of {input_mib:.1f} MiB "
        f"({arguments.tokens} tokens x {arguments.dim}, fp32): {arguments.layers * input_mib:.0f} MiB of inputs"
    )
    print(f"{'variant':<12}{'peak MiB':>10}{'step ms':>10}{'copy ms':>10}{'wait ms':>10}{'hidden':>8}  same gradients")
    for result in results:
        same = "yes" if result["gradients"] == results[0]["gradients"] else "NO"
        print(
            f"{result['variant']:<12}{result['peak_mib']:>10.0f}{result['step_ms']:>10.0f}{result['copy_ms']:>10.0f}"
            f"{result['wait_ms']:>10.0f}{result['overlap_efficiency']:>8.2f}  {same}"
        )
    print(results[-1]["chosen"])


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="number of blocks (default 12)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per input (default 8192)")
    parser.add_argument("--dim", type=int, default=512, help="hidden size (default 512)")
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after one that is not (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default 1)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="what to run")
    parser.add_argument("--folder", help="folder of the disk tier, not in memory (default: a new temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or temporary
        results = [run_variant(variant, arguments, folder) for variant in arguments.variants]
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        print_table(results, arguments)
    return 0 if len({result["gradients"] for result in results}) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
