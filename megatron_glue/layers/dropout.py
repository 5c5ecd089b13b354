"""Dropout of one site of the model, seeded by where and when it happens.

The mask depends on the run seed, the step, the GLOBAL micro-batch, the layer, the site and the token, so recompute, a
resumed run and every layout repeat it, and no global random generator is used. A token counts by its index in the whole
micro-batch, wherever context or sequence parallelism has put its row.

Shape suffixes: T tokens, D model.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron_glue.ops.dropout import derive_seed, seed_of_name, seeded_dropout
from megatron_glue.types import ForwardContext


def site_seed(context: ForwardContext, layer_index: int, site: str) -> int:
    """Return the seed of one site in one micro-batch.

    Args:
        context: The micro-batch.
        layer_index: Global index of the layer, -1 for the embedding.
        site: Name of the place inside the layer.
    """
    return derive_seed(context.seed, context.step, context.micro_batch, layer_index, seed_of_name(site))


class SeededDropout(nn.Module):
    """Dropout on rows of the residual stream. Off in evaluation, and when its probability is 0.

    Args:
        probability: Of dropping an element, in [0, 1).
        layer_index: Global index of the layer, -1 for the embedding.
        site: Name of the place inside the layer; two places of one layer need two names.
    """

    def __init__(self, probability: float, layer_index: int, site: str) -> None:
        super().__init__()
        self.probability = probability
        self._layer_index = layer_index
        self._site = site

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Drop elements and scale the others.

        Args:
            x_TD: The rows of the residual stream that this rank holds.
            context: The micro-batch; it says which tokens they are.

        Returns:
            Same shape and dtype; ``x_TD`` itself when off.
        """
        if self.probability == 0.0 or not self.training:
            return x_TD
        seed = site_seed(context, self._layer_index, self._site)
        rows = context.residual_rows or slice(0, context.sequence.num_tokens)
        token_ids_T = context.sequence.token_ids_T
        if token_ids_T is not None:
            return seeded_dropout(x_TD, self.probability, seed, row_ids_T=token_ids_T[rows])
        return seeded_dropout(x_TD, self.probability, seed, row_offset=rows.start)

    def extra_repr(self) -> str:
        """Say what ``print(model)`` shows."""
        return f"{self.probability}, layer={self._layer_index}, site={self._site!r}"
