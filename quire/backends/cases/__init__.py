"""Inputs for the conformance test: for each op, small programs with generated inputs and the error they may show.

A case runs the same program over the same steps on two backends. The cases of an op are `of(name, ...)`: those of an elementwise op
follow from its declaration, those of any other are `<name>_cases` here, and lie in a file for each kind of op. What they are made
of is kit.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from quire.backends.batch import Batch as Batch
from quire.backends.cases.adapters import adapt_cases as adapt_cases
from quire.backends.cases.attention import attention_cases as attention_cases
from quire.backends.cases.attention import encode_cases as encode_cases
from quire.backends.cases.attention import latent_attention_cases as latent_attention_cases
from quire.backends.cases.elementwise import elementwise_cases as elementwise_cases
from quire.backends.cases.experts import moe_cases as moe_cases
from quire.backends.cases.experts import spread as spread
from quire.backends.cases.groups import group_cases as group_cases
from quire.backends.cases.kit import NO_KV as NO_KV
from quire.backends.cases.kit import ROUND as ROUND
from quire.backends.cases.kit import Bound as Bound
from quire.backends.cases.kit import Case as Case
from quire.backends.cases.kit import MakeWeight as MakeWeight
from quire.backends.cases.kit import Step as Step
from quire.backends.cases.kit import attention_bound as attention_bound
from quire.backends.cases.kit import floats as floats
from quire.backends.cases.kit import linear_bound as linear_bound
from quire.backends.cases.kit import ragged as ragged
from quire.backends.cases.kit import relative as relative
from quire.backends.cases.kit import single as single
from quire.backends.cases.products import embed_cases as embed_cases
from quire.backends.cases.products import head_linear_cases as head_linear_cases
from quire.backends.cases.products import linear_cases as linear_cases
from quire.backends.cases.rowwise import join_cases as join_cases
from quire.backends.cases.rowwise import layer_norm_cases as layer_norm_cases
from quire.backends.cases.rowwise import rms_norm_cases as rms_norm_cases
from quire.backends.cases.rowwise import rope_cases as rope_cases
from quire.backends.cases.rowwise import take_cases as take_cases
from quire.backends.cases.states import conv_cases as conv_cases
from quire.backends.cases.states import delta_rule_cases as delta_rule_cases
from quire.backends.elementwise import ELEMENTWISE
from quire.backends.ops import KV as KV


def of(op: str, weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """The cases of an op of the table, over weights of every kind."""
    if op in ELEMENTWISE:
        return elementwise_cases(ELEMENTWISE[op], rng)
    return globals()[f"{op}_cases"](weights, rng)
