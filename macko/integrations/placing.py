"""A model that from_pretrained packed for an offloader, put where its device_map says by accelerate's hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..nn.offload import offloadable_

#: Arguments of from_pretrained that say where parts of a model go.
PLACING = ("device_map", "max_memory", "offload_folder", "offload_buffers")
#: Of device_map: accelerate makes the map.
AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def dispatch(
    model: Any,
    not_split: Sequence[str],
    skipped: Any,
    device_map: Any,
    max_memory: Any,
    offload_folder: Any,
    offload_buffers: Any,
) -> None:
    """Makes the model offloadable, and dispatches it where there is a device_map.

    Args:
        not_split: names of classes whose modules stay whole, where accelerate makes the map.
        skipped: arguments that are not moved.
    """
    from accelerate import dispatch_model, infer_auto_device_map

    offloadable_(model)
    if device_map is None:
        return
    if device_map in AUTOMATIC:
        device_map = infer_auto_device_map(model, max_memory, no_split_module_classes=list(not_split))
    places = device_map if isinstance(device_map, dict) else {"": device_map}
    if places.get("") == "disk":  # under the name of the whole accelerate would put nothing there
        whole = (*model.named_children(), *model.named_parameters(recurse=False), *model.named_buffers(recurse=False))
        places = {name: "disk" for name, _ in whole} | {name: place for name, place in places.items() if name}
    dispatch_model(model, places, offload_dir=offload_folder, offload_buffers=bool(offload_buffers), skip_keys=skipped)
