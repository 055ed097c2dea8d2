"""Key policies, one file each: rules that select the keys that a query attends to or that a KV cache keeps."""

from limitlens.attention.policies.adakv import AdaKV
from limitlens.attention.policies.base import KeyPolicy, PolicyInput, Selection, keep
from limitlens.attention.policies.expected import Expected
from limitlens.attention.policies.knorm import KNorm
from limitlens.attention.policies.kvzip import KVzip
from limitlens.attention.policies.oracle_topk import OracleTopK
from limitlens.attention.policies.patterns import Block, Dilated, Strided, WindowRandom
from limitlens.attention.policies.priority import Priority
from limitlens.attention.policies.random import Random, RandomEviction
from limitlens.attention.policies.recent import Recent
from limitlens.attention.policies.reconstruction import Reconstruction
from limitlens.attention.policies.shared import SharedPolicy
from limitlens.attention.policies.snapkv import SnapKV
from limitlens.attention.policies.streaming import Streaming
from limitlens.errors import InputError

_CACHE = (
    Random(), RandomEviction(), Recent(), Streaming(), KNorm(), SnapKV(), Expected(), Priority(), Reconstruction(),
    OracleTopK(),
)  # fmt: skip
POLICIES: dict[str, KeyPolicy] = {policy.name: policy for policy in _CACHE}  # policies that cache plans compare
SHARED: dict[str, SharedPolicy] = {policy.name: policy for policy in (KVzip(), AdaKV())}  # baselines of trials
PATTERNS: dict[str, KeyPolicy] = {policy.name: policy for policy in (WindowRandom(), Strided(), Dilated(), Block())}


def get_policy(name: str) -> KeyPolicy:
    """Key policy with the given name, such as "snapkv"; an unknown name raises an `InputError`."""
    known = POLICIES | PATTERNS
    if name not in known:
        raise InputError(f"the key policy is {name!r}; expected one of {', '.join(known)}")
    return known[name]


__all__ = [
    "PATTERNS",
    "POLICIES",
    "SHARED",
    "KeyPolicy",
    "PolicyInput",
    "Selection",
    "SharedPolicy",
    "get_policy",
    "keep",
]
