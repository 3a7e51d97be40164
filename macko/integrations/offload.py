"""accelerate: an offload that would leave packed weights where they are is refused, before anything has moved.

accelerate offloads Parameters, and buffers only where it is asked to, by the names of a state_dict: which packed layers
have after macko.offloadable_ alone.
"""

from __future__ import annotations

from typing import Any

from accelerate import big_modeling
from torch import nn

from ..nn.offload import check_offloadable
from . import wrap


def _checked(attach: Any) -> Any:
    def attach_align_device_hook(
        module: nn.Module, execution_device: Any = None, offload: Any = False, **kwargs: Any
    ) -> Any:
        places = offload if isinstance(offload, dict) else {"": offload}
        for name in (name for name, offloaded in places.items() if offloaded):
            check_offloadable(module.get_submodule(name), f"accelerate's offload of {name or 'the model'}")
        return attach(module, execution_device=execution_device, offload=offload, **kwargs)

    return attach_align_device_hook


for _function in ("attach_align_device_hook", "attach_align_device_hook_on_blocks"):
    wrap(big_modeling, _function, _checked)
