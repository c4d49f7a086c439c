"""Inputs for the conformance test: for each op, small programs with generated inputs and the error they may show.

A case runs the same program over the same steps on two backends. The cases of an op are `<name>_cases` here, and lie in a
file for each kind of op; what they are made of is kit.py.
"""

from quire.backends.batch import Batch as Batch
from quire.backends.cases.adapters import adapt_cases as adapt_cases
from quire.backends.cases.attention import attention_cases as attention_cases
from quire.backends.cases.attention import encode_cases as encode_cases
from quire.backends.cases.attention import latent_attention_cases as latent_attention_cases
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
from quire.backends.cases.rowwise import add_cases as add_cases
from quire.backends.cases.rowwise import geglu_cases as geglu_cases
from quire.backends.cases.rowwise import gelu_cases as gelu_cases
from quire.backends.cases.rowwise import join_cases as join_cases
from quire.backends.cases.rowwise import layer_norm_cases as layer_norm_cases
from quire.backends.cases.rowwise import rms_norm_cases as rms_norm_cases
from quire.backends.cases.rowwise import rope_cases as rope_cases
from quire.backends.cases.rowwise import scale_cases as scale_cases
from quire.backends.cases.rowwise import softcap_cases as softcap_cases
from quire.backends.cases.rowwise import swiglu_cases as swiglu_cases
from quire.backends.cases.rowwise import take_cases as take_cases
from quire.backends.cases.states import conv_cases as conv_cases
from quire.backends.cases.states import delta_rule_cases as delta_rule_cases
from quire.backends.cases.states import sigmoid_gate_cases as sigmoid_gate_cases
from quire.backends.ops import KV as KV
