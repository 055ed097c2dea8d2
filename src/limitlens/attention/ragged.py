"""Keys and values of heads that keep different numbers of tokens, in one buffer, and attention over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limitlens.attention import kernels
from limitlens.attention.kernels import ragged as cuda
from limitlens.attention.subset import attend_subset, scores_of

ROOM = 16  # entries by which each row grows, at least: more copies with fewer, more unused memory with more
ROOM_SHARE = 64  # rows grow by a 64th of their mean length if that is more


@dataclass(eq=False)
class RaggedRows:
    """Keys and values of R = H·B rows (heads of sequences), one row after the other in one buffer.

    Row h·B + b holds `kept[h·B + b]` entries of head h of sequence b, then `new` entries that were appended to every
    row, then unused entries up to `room`. The first axis of all buffers counts entries.
    """

    key: Tensor  # (E, k)
    value: Tensor  # (E, v)
    kept: tuple[int, ...]  # (R,)
    batch: int  # number of sequences B
    log_weight: Tensor | None = None  # (E,): added to the scores; None: zero
    position: Tensor | None = None  # (E,): index of the token, only for layers with a sliding window
    new: int = 0
    room: int = 0

    def __post_init__(self) -> None:
        """Compute where rows begin, and the runs of rows of equal length, which are views of one shape."""
        starts = [0]
        for kept in self.kept:
            starts.append(starts[-1] + kept + self.room)
        self.starts = starts
        bounds = [r for r in range(1, len(self.kept)) if self.kept[r] != self.kept[r - 1]]
        self.runs = list(zip([0, *bounds], [*bounds, len(self.kept)], strict=True))
        self.start, self.count = torch.tensor([starts[:-1], self.kept]).to(self.key.device, non_blocking=True)
        self.parts: dict[int, cuda.Parts] = {}  # by their size, for the CUDA programs

    @property
    def end(self) -> Tensor:
        """Index (R,) behind the last entry of each row."""
        end: Tensor = self.start + self.count + self.new
        return end

    @property
    def bytes(self) -> int:
        """Bytes of all buffers, unused entries included."""
        parts = (self.key, self.value, self.log_weight, self.position)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def append(self, key: Tensor, value: Tensor, position: int) -> None:
        """Add the entries of L new tokens, keys (B, H, L, k) and values (B, H, L, v), to all rows.

        `position` is the index of the first new token in the sequence.
        """
        length = key.shape[2]
        if self.new + length > self.room:
            block = max(ROOM, sum(self.kept) // (len(self.kept) * ROOM_SHARE), self.new + length - self.room)
            self.rebuild(range(len(self.kept)), self.room + block)
        if self.position is None and cuda.able(key, value):
            cuda.append(key, value, self.key, self.value, self.start, self.count, self.new)
        else:
            place = (self.end[:, None] + torch.arange(length, device=key.device)).flatten()
            for buffer, part in ((self.key, key), (self.value, value)):
                buffer.index_copy_(0, place, part.detach().transpose(0, 1).reshape(-1, part.shape[-1]))
            if self.position is not None:
                tokens = torch.arange(position, position + length, device=key.device, dtype=self.position.dtype)
                self.position.index_copy_(0, place, tokens.repeat(len(self.kept)))
        self.new += length  # log-weights of new tokens are zero, as those of unused entries

    def rebuild(self, rows: Sequence[int], room: int) -> None:
        """Copy the given rows, in this order, into new buffers with `room` entries for new tokens in each row."""
        made = [None if part is None else self._copied(part, rows, room) for part in
                (self.key, self.value, self.log_weight, self.position)]  # fmt: skip
        # Assigned only now: if memory does not suffice, the old buffers are still whole.
        self.key, self.value, self.log_weight, self.position = made  # type: ignore[assignment]
        self.batch = self.batch * len(rows) // len(self.kept)
        self.kept = tuple(self.kept[row] for row in rows)
        self.room = room
        self.__post_init__()

    def _copied(self, part: Tensor, rows: Sequence[int], room: int) -> Tensor:
        unused = part.new_zeros(room - self.new, *part.shape[1:])
        used = [part[self.starts[row] : self.starts[row] + self.kept[row] + self.new] for row in rows]
        return torch.cat([piece for row in used for piece in (row, unused)])

    @classmethod
    def joined(cls, parts: Sequence[RaggedRows]) -> RaggedRows:
        """Join the rows of several batches, without new tokens so far, into one batch."""
        heads = range(len(parts[0].kept) // parts[0].batch)

        def cat(name: str) -> Tensor | None:
            buffers = [getattr(part, name) for part in parts]
            if all(buffer is None for buffer in buffers):
                return None
            filled = [part.key.new_zeros(len(part.key), dtype=torch.float32) if buffer is None else buffer
                      for part, buffer in zip(parts, buffers, strict=True)]  # fmt: skip
            sizes = [[part.starts[(head + 1) * part.batch] - part.starts[head * part.batch] for head in heads]
                     for part in parts]  # fmt: skip
            pieces = [buffer.split(size) for buffer, size in zip(filled, sizes, strict=True)]
            return torch.cat([piece[head] for head in heads for piece in pieces])

        kept = tuple(
            count for head in heads for part in parts
            for count in part.kept[head * part.batch : (head + 1) * part.batch]
        )  # fmt: skip
        key, value, weight, position = map(cat, ("key", "value", "log_weight", "position"))
        assert key is not None
        assert value is not None
        return cls(key, value, kept, sum(part.batch for part in parts), weight, position)

    def select(self, sequences: Sequence[int]) -> None:
        """Keep the given sequences of the batch, in this order; a sequence may occur more than once."""
        heads = range(len(self.kept) // self.batch)
        self.rebuild([head * self.batch + b for head in heads for b in sequences], self.room)

    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` appended tokens from all rows."""
        self.new -= tokens

    def views(self) -> Iterator[tuple[slice, list[Tensor | None]]]:
        """Runs of rows of equal length: the rows, and views (rows, n, ...) of key, value, log-weight and position."""
        for first, last in self.runs:
            size, capacity = last - first, self.kept[first] + self.room
            inside = slice(self.starts[first], self.starts[last])
            parts = (self.key, self.value, self.log_weight, self.position)
            shaped = (part if part is None else part[inside].view(size, capacity, *part.shape[1:]) for part in parts)
            length = self.kept[first] + self.new
            yield slice(first, last), [part if part is None else part[:, :length] for part in shaped]

    def attend(
        self, query: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None,
        seen: Tensor | None = None, window: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention outputs (B, Hq, L, v) of queries (B, Hq, L, k) whose own keys are the last L entries of each row.

        A query sees the entries of all earlier tokens. `seen` (B, L, new), if given, says which of the new tokens it
        sees. `sinks` (Hq,) are logits of learned sinks, and `window` is the length of a sliding window.
        """
        batch, _, length, width = query.shape
        rows = len(self.kept)
        if window is None and cuda.able(query, self.value):
            return cuda.attend(
                query, self.key, self.value, self.log_weight, self.start, self.count, self.new,
                self._parts(query.shape[1] * batch // rows * length), scale=scale, softcap=softcap, sinks=sinks,
                seen=seen,
            )  # fmt: skip
        grouped = query.reshape(batch, rows // batch, -1, length, width).transpose(0, 1)
        grouped = grouped.reshape(rows, -1, width) * scale  # (R, G·L, k): queries that share their keys
        parts = [self._attend(grouped[at], at, view, length, softcap, seen, window) for at, view in self.views()]
        lse, output = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        output = output.view(rows // batch, batch, -1, length, output.shape[-1]).transpose(0, 1).flatten(1, 2)
        if sinks is not None:
            lse = lse.view(rows // batch, batch, -1, length).transpose(0, 1).flatten(1, 2)
            output = output * torch.sigmoid(lse - sinks.view(1, -1, 1).to(lse))[..., None]
        return output.to(query.dtype)

    def _parts(self, queries: int) -> cuda.Parts:
        """Parts of rows for the CUDA programs, made once for each layout of the rows."""
        size = cuda.part_size(self.starts[-1], queries)
        if size not in self.parts:
            self.parts[size] = cuda.cut([kept + self.room for kept in self.kept], size, self.key.device)
        return self.parts[size]

    def _attend(
        self, query: Tensor, rows: slice, view: list[Tensor | None], length: int, softcap: float | None,
        seen: Tensor | None, window: int | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Log-sum-exps (r, G·L) and outputs (r, G·L, v) of queries (r, G·L, k) of rows of equal length."""
        key, value, weight, position = view
        assert key is not None
        assert value is not None
        bias = None if weight is None else weight[:, None].to(query.dtype)
        hidden = self._hidden(rows, key, length, seen, position, window)
        if hidden is not None:
            groups = query.shape[1] // length
            zero = query.new_zeros(()) if bias is None else bias
            bias = torch.where(hidden.repeat(1, groups, 1), float("-inf"), zero)
        rounded = weight is not None and query.dtype != torch.float32  # the fused kernel would round log-weights
        if softcap is None and query.device.type == "cpu" and not rounded:
            return kernels.attend_cpu(query, key, value, bias)
        return attend_subset(scores_of(query.float(), key.float(), softcap), value.float(), log_weights=bias)

    def _hidden(
        self, rows: slice, key: Tensor, length: int, seen: Tensor | None, position: Tensor | None, window: int | None
    ) -> Tensor | None:
        """Entries (r or 1, L, n) that each of L queries does not see; None if they see all."""
        if length == 1 and seen is None and window is None:
            return None
        total = key.shape[1]
        place = torch.arange(total, device=key.device)
        query = torch.arange(total - length, total, device=key.device)[:, None]
        hidden = (place > query)[None]
        if seen is not None:
            sequence = torch.arange(rows.start, rows.stop, device=key.device) % self.batch
            hidden = hidden.repeat(rows.stop - rows.start, 1, 1)
            hidden[..., total - self.new :] |= ~seen[sequence]
        if window is not None:
            assert position is not None
            hidden = hidden | (position[:, None] <= position[:, -length:, None] - window)
        return hidden
