"""peft: what `modules_to_save` names is trained, packed or not.

peft trains a copy of such a module. A packed weight has no gradient, so the copy of a packed layer is dense; the layer
itself stays packed, and is what runs where the adapter is off.

Where an adapter that is loaded goes peft tells by the names of a state_dict: no layer is unpacked for it.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from ..nn.linear import SparseLinear, with_hooks
from ..weights.saved import states_without_content
from . import wrap


def _with_dense_copies(update: Any) -> Any:
    def dense_update(self: Any, adapter_name: str, **kwargs: Any) -> Any:
        packed = any(isinstance(module, SparseLinear) for module in self.original_module.modules())
        if packed and not kwargs.get("tied_module") and adapter_name not in self.modules_to_save:
            self.modules_to_save[adapter_name] = _dense(copy.deepcopy(self.original_module))
        return update(self, adapter_name, **kwargs)

    return dense_update


def _dense(module: nn.Module) -> nn.Module:
    """The module with dense layers in the places of its packed ones."""
    if isinstance(module, SparseLinear):
        return with_hooks(module.to_linear(), module)
    dense: dict[nn.Module, nn.Module] = {}
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, SparseLinear):
            module.set_submodule(name, dense.setdefault(layer, _dense(layer)))
    return module


def register() -> None:
    wrap(ModulesToSaveWrapper, "update", _with_dense_copies)
    tuner = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTuner", None)
    if hasattr(tuner, remap := "_remap_adapter_state_dict_for_load"):  # not in every peft
        wrap(tuner, remap, states_without_content())
