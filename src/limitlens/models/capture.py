"""See what every attention layer sees: query, key and value as they enter the softmax."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from limitlens.arrays import PreTrainedModel, Tensor
from limitlens.models.relay import Captured, Output, See, through


@contextmanager
def capture(model: PreTrainedModel, on_attention: Callable[[Captured], None], *, hidden: bool = False) -> Iterator[See]:
    """Call `on_attention` with each layer's `Captured` in every forward of `model` within the block.

    `with capture(model, take) as see:` gives a function for where outputs are not wanted: `see(input_ids=ids)` ends at
    the last layer's attention. The outputs of a whole forward are those of the model outside the block, and the model
    is put back as it was on leaving, whatever happened. A capture may be opened inside an intervention, and sees what
    reaches it. For the rest see `limitlens.models.relay.through`.
    """

    def look(call: Captured, go_on: Callable[[Tensor], Output]) -> Output:
        on_attention(call)
        return go_on(call.query)

    with through(model, look, inside=True, hidden=hidden) as see:
        yield see
