"""A model without its weights: names, shapes and ties, from a configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Build the model that a configuration names, on the meta device: it costs no memory, whatever its size.

    Args:
        config: its ``architectures`` entry decides on the class; without one, a masked or causal LM.

    Raises:
        ValueError: transformers knows no such model.
    """
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    named = [getattr(transformers, name, None) for name in config.architectures or []]
    known = [kind for kind in named if kind is not None and isinstance(config, kind.config_class or ())]
    with torch.device("meta"):
        if known:
            return known[0](config)  # type: ignore[no-any-return]
        masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        auto = AutoModelForMaskedLM if masked else AutoModelForCausalLM
        return auto.from_config(config)  # type: ignore[no-any-return]
