"""A copy of a decoder's weights for `fast_forward`, in the form that is read fastest.

Projections that read the same input are one matrix, as are their adapters, and weights are cast and
packed once. Decoders like Llama, Qwen2 and Qwen3 have this form.

Shape letters: H query heads, K key-value heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners import lora
from torch.nn.functional import linear

from openenv_pipe.extras.cpu_sampling.row_attention import RowStore
from openenv_pipe.models.forward.products import pad_rows

ARCHITECTURES = ("LlamaModel", "Qwen2Model", "Qwen3Model")
_TYPICAL_ROWS = 64  # for which oneDNN packs the weights


def unsupported_reason(model: Any, decoder: Any) -> str | None:
    """Return why this model cannot be sampled with the pass; None if it can."""
    parameters = list(model.parameters())
    if type(decoder).__name__ not in ARCHITECTURES:
        return f"its architecture is {type(decoder).__name__}"
    adapted = [each for each in model.modules() if isinstance(each, lora.LoraLayer)]
    if any(type(each) is not lora.Linear for each in adapted):
        return "it has adapters of other layers than linear ones"
    if parameters[0].device.type != "cpu":
        return f"it is on {parameters[0].device.type}"
    if any(values.dtype != torch.float32 for values in parameters):
        return "its weights are not float32"
    return None


class _Matrix:
    """A matrix and its bias, packed for oneDNN where torch has it."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, precision: torch.dtype
    ) -> None:
        self._weight = weight.to(precision)
        self._bias = None if bias is None else bias.to(precision)
        self._precision = precision
        self._is_packed = torch.backends.mkldnn.is_available() and (
            precision is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, _TYPICAL_ROWS)
            self._onednn_linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, inputs_NI: torch.Tensor) -> torch.Tensor:
        inputs_NI = inputs_NI.to(self._precision)
        if not (self._is_packed or self._precision is torch.bfloat16):
            return linear(inputs_NI, self._weight, self._bias)
        num_rows, padded_NI = inputs_NI.shape[0], pad_rows(inputs_NI)
        if self._is_packed:
            outputs = self._onednn_linear(padded_NI, self._weight, self._bias, "none", [], "")
        else:
            outputs = linear(padded_NI, self._weight, self._bias)
        return outputs if outputs.shape[0] == num_rows else outputs[:num_rows]


class _Product:
    """A linear layer, or several that read the same input.

    In float32, adapters are merged into the matrix. In bfloat16, what a barely trained adapter adds
    to a weight is less than half of the step to the next number and would be rounded away: there,
    the second factor is more columns of the matrix, which multiply what the first one gives.
    """

    def __init__(self, modules: Sequence[Any], precision: torch.dtype) -> None:
        biases: list[torch.Tensor] = [module.bias for module in modules if module.bias is not None]
        bias = torch.cat(biases) if biases else None
        self._down = None
        if precision is torch.bfloat16 and any(map(_is_adapted, modules)):
            downs, ups = zip(*map(_factors, modules), strict=True)
            self._down = _Matrix(torch.cat(downs), None, precision)
            weight = torch.cat([module.weight.to(precision) for module in modules])
            weight = torch.cat([weight, torch.block_diag(*ups).to(precision)], dim=1)
        else:
            weight = torch.cat([_merged_weight(module).to(precision) for module in modules])
        self._matrix = _Matrix(weight, bias, precision)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._down is not None:
            inputs = inputs.to(torch.bfloat16)
            inputs = torch.cat([inputs, self._down(inputs)], dim=-1)
        return self._matrix(inputs)


def _is_adapted(module: Any) -> bool:
    return type(module) is lora.Linear


def _merged_weight(module: Any) -> torch.Tensor:
    """Return the matrix of a linear layer, with its adapter if it has one."""
    weight: torch.Tensor = module.weight
    return weight + module.get_delta_weight("default") if _is_adapted(module) else weight


def _factors(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two matrices whose product a layer's adapter adds, of rank 0 if it has none."""
    if not _is_adapted(module):
        outputs, inputs = module.weight.shape
        return module.weight.new_empty(0, inputs), module.weight.new_empty(outputs, 0)
    down, up = module.lora_A["default"].weight, module.lora_B["default"].weight
    return down, up * module.scaling["default"]


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: _Product
    output: _Product
    gate_up: _Product
    down: _Product
    activation: Callable[[torch.Tensor], torch.Tensor]
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qk_norm: torch.Tensor | None  # [H + K, D]


class PackedDecoder:
    """A copy of the weights of a decoder and its head, which several passes may share."""

    @torch.no_grad()
    def __init__(self, decoder: Any, head: Any, precision: torch.dtype) -> None:
        attention = decoder.layers[0].self_attn
        self.num_heads: int = decoder.config.num_attention_heads
        self.num_kv_heads: int = decoder.config.num_key_value_heads
        self.head_size: int = attention.head_dim
        self.scale: float = attention.scaling
        self.eps: float = decoder.config.rms_norm_eps
        self.rotary = decoder.rotary_emb
        self.embedding = decoder.embed_tokens.weight.clone()
        self.layers = [self._layer(each, precision) for each in decoder.layers]
        self.norm = decoder.norm.weight.clone()
        self.head = _Product([head], precision)

    def new_store(self) -> RowStore:
        return RowStore(
            num_layers=len(self.layers),
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
        )

    def _layer(self, layer: Any, precision: torch.dtype) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qk_norm = None
        if hasattr(attention, "q_norm"):
            of_queries = attention.q_norm.weight.expand(self.num_heads, -1)
            of_keys = attention.k_norm.weight.expand(self.num_kv_heads, -1)
            qk_norm = torch.cat([of_queries, of_keys])
        return _Layer(
            qkv=_Product([attention.q_proj, attention.k_proj, attention.v_proj], precision),
            output=_Product([attention.o_proj], precision),
            gate_up=_Product([mlp.gate_proj, mlp.up_proj], precision),
            down=_Product([mlp.down_proj], precision),
            activation=mlp.act_fn,
            attention_norm=layer.input_layernorm.weight.clone(),
            mlp_norm=layer.post_attention_layernorm.weight.clone(),
            qk_norm=qk_norm,
        )
