"""Read the queries, keys and values of every attention layer of a running model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from limitlens.arrays import PreTrainedModel, Tensor
from limitlens.models.relay import Captured, Output, Runner, hook_attention


@contextmanager
def capture(
    model: PreTrainedModel, on_attention: Callable[[Captured], None], *, hidden: bool = False
) -> Iterator[Runner]:
    """Call `on_attention` with the `Captured` of every attention layer in every forward of `model` within the block.

    `with capture(model, take) as run_until_last_attention:` gives a function that runs the model without its outputs:
    `run_until_last_attention(input_ids=ids)` stops at the attention of the last layer. A whole forward within the
    block returns the same outputs as outside it, and the model is restored on leaving, also after an error. A capture
    may be opened inside an intervention, and then sees the changed queries. `hook_attention` has the details.
    """

    def handle(call: Captured, proceed: Callable[[Tensor], Output]) -> Output:
        on_attention(call)
        return proceed(call.query)

    with hook_attention(model, handle, inside=True, hidden=hidden) as run_until_last_attention:
        yield run_until_last_attention
