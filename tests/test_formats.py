"""Packed weights as dataclasses: what they say of themselves, moving them, and validating what comes from outside."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from macko import FORMATS, MackoWeight, SparseLinear, _library, ops, sparsify_
from macko.choose.auto import pack
from macko.choose.options import CHOICES, Options
from macko.files import Checkpoint, as_extra_state
from macko.weights import (
    SAVED,
    BitmapWeight,
    ByteWeight,
    Dense12Weight,
    EcWeight,
    PackedWeight,
    SellWeight,
    SlideWeight,
)
from tests.common import assert_same_bits, devices, each_token, integer_problem, random_weight
from verify.fuzz import honest


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", devices())
def test_every_format_has_the_same_face(name: str, device: str) -> None:
    if device not in FORMATS[name].device_types:
        pytest.skip(f"{name} runs on {FORMATS[name].device_types}")
    w = random_weight(33, 77, 0.4, FORMATS[name].dtypes[0]).to(device)
    packed = FORMATS[name].from_dense(w)
    assert isinstance(packed, PackedWeight)
    assert packed.format == name
    assert packed.shape == (packed.rows, packed.cols) == (33, 77)
    assert packed.dtype == w.dtype
    assert packed.device.type == device
    assert packed.density == int(w.count_nonzero()) / w.numel()
    assert packed.stored >= int(w.count_nonzero())
    assert packed.nbytes == sum(t.nbytes for t in packed.tensors().values())
    if packed.lossless:
        assert_same_bits(packed.to_dense(), w)
    packed.validate()
    again = type(packed)(**packed.tensors(), **packed.sizes())
    assert_same_bits(again.to_dense(), packed.to_dense())
    with pytest.raises(dataclasses.FrozenInstanceError):
        packed.rows = 3


def test_numbers_are_those_of_the_library() -> None:
    known = {**FORMATS, "planes12": SAVED["planes12"]}
    assert [kind.number for kind in known.values()] == list(range(len(known)))
    for name, kind in known.items():
        with pytest.raises(RuntimeError, match=rf"packed has 9 tensors and header 3 numbers, {name} has \d"):
            torch.ops.macko.dense([torch.empty(0)] * 9, [kind.number, 0, 0])
    with pytest.raises(RuntimeError, match=f"expected 0 to {len(known) - 1}"):
        torch.ops.macko.dense([torch.empty(0)], [len(known), 0, 0])


@pytest.mark.parametrize("name", ["tile", "macko8"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    taken = {**FORMATS, **SAVED}
    with pytest.raises(TypeError, match=f"Other: the format {name} is {taken[name].__name__}"):
        type("Other", (PackedWeight,), {"format": name, "__module__": __name__})
    assert taken == {**FORMATS, **SAVED}


@pytest.mark.gpu
def test_code_for_7_5_says_what_it_has_no_kernels_for() -> None:
    if _library.code_capability() >= (8, 0):
        pytest.skip("the library has code of 8.0 for this GPU")
    tile = FORMATS["tile"].from_dense(random_weight(64, 256, 0.5, torch.float16).cuda())
    for call in (tile.to_dense, lambda: tile.linear(torch.ones(1, 256, device="cuda").half())):
        with pytest.raises(RuntimeError, match=r"slabs need a GPU of compute capability 8\.0"):
            call()
    slide = FORMATS["slide"].from_dense(random_weight(64, 256, 0.5, torch.float16).cuda())
    with pytest.raises(RuntimeError, match=r"slide needs a GPU of compute capability 8\.0"):
        slide.linear(torch.ones(1, 256, device="cuda").half())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if "cuda" in format.device_types])
def test_second_gpu(name: str) -> None:
    """Made, run, unpacked and validated while the other GPU is the current one."""
    w, x, y = integer_problem(264, 520, 0.4, FORMATS[name].dtypes[0])
    for at, current in (("cuda:1", 0), ("cuda:0", 1)):
        with torch.cuda.device(current):
            packed = FORMATS[name].from_dense(w.to(at))
            packed.validate()
            assert {str(t.device) for t in packed.tensors().values()} == {at}
            assert_same_bits(packed.to_dense().cpu(), w)
            assert_same_bits(packed.to(f"cuda:{current}").to_dense().cpu(), w)
            for tokens in (1, 3, 200):
                xs, ys = each_token(x, y, tokens)
                got = packed.linear(xs.to(at), torch.ones(264, dtype=w.dtype, device=at))
                assert str(got.device) == at
                assert_same_bits(got.cpu() + 0, ys + 1)
            with pytest.raises(RuntimeError, match=f"x is on cuda:{current}, .* is on {at}"):
                packed.linear(x.to(f"cuda:{current}"))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_another_dtype_keeps_the_options(bits: int) -> None:
    packed = MackoWeight.from_dense(random_weight(9, 77, 0.4, torch.bfloat16), delta_bits=bits)
    wide = packed.to(dtype=torch.float32)
    assert isinstance(wide, MackoWeight)
    assert wide.delta_bits == bits
    assert_same_bits(wide.to_dense(), packed.to_dense().float())


def corrupted(**changes: Any) -> MackoWeight:
    """Rows [1 0 2 3 0...], [], [4], with every gap under 16, and what is to be changed."""
    w = torch.zeros(3, 40, dtype=torch.float16)
    w[0, 0], w[0, 2], w[0, 3], w[2, 20] = 1, 2, 3, 4
    packed = MackoWeight.from_dense(w)  # row 2: a zero at column 15, then 4
    assert packed.row_ptr.tolist() == [0, 3, 3, 5]
    assert packed.values.tolist() == [1, 2, 3, 0, 4, 0, 0, 0]
    assert packed.deltas.tolist() == [0x10, 0xF0, 0x04, 0]
    return dataclasses.replace(packed, **changes)


def halves(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float16)


def octets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_ptr": ints(1, 3, 3, 5)}, r"row_ptr\[0\] is 1, expected 0"),
        ({"row_ptr": ints(0, 3, 2, 5)}, "row_ptr falls to 2 at index 2"),
        ({"row_ptr": ints(0, 3, 3, 9)}, r"row_ptr\[3\] is 9, values has 8 entries"),
        ({"row_ptr": ints(0, 3, 3, -1)}, "row_ptr falls to -1 at index 3"),
        ({"row_ptr": ints(0, 3, 5)}, "row_ptr has 3 entries, expected 4 for 3 rows"),
        ({"values": halves(1, 2, 3, 0, 4, *[0] * 11), "deltas": octets(0x10, 0xF0, 4, *[0] * 5)},
         r"row_ptr\[3\] is 5, values has 16 entries"),
        ({"cols": 20}, "row 2, entry 4: the deltas put it at column 20, the matrix has 20 columns"),
        ({"cols": 0}, "row 0, entry 0: the deltas put it at column 0, the matrix has 0 columns"),
        ({"values": halves(1, 0, 3, 0, 4, 0, 0, 0)}, r"row 0, entry 1: a zero .* its delta is 1"),
        ({"values": halves(1, 2, 3, -0.0, 4, 0, 0, 0)}, "row 2, entry 3: a zero"),
        ({"values": halves(1, 2, 3, 0, 0, 0, 0, 0)}, "row 2, entry 4: a zero"),
        ({"values": halves(1, 2, 3, 0, 4, 0, 5, 0)}, "entry 6, after the last one"),
        ({"deltas": octets(0x10, 0xF0, 0x04, 1)}, "entry 6, after the last one"),
        ({"deltas": octets(0x10, 0xF0, 0x04)}, "deltas has 3 bytes, expected 4"),
        ({"deltas": torch.zeros(4, dtype=torch.int8)}, "deltas has dtype int8"),
        ({"deltas": octets(0, 0, 0, 0).view(torch.float4_e2m1fn_x2)}, "deltas has dtype float4_e2m1fn_x2, which"),
        ({"row_ptr": torch.zeros(4, dtype=torch.int64)}, "row_ptr has dtype int64"),
        ({"values": halves(1, 2, 3)}, "values has 3 entries, expected a multiple of 8"),
        ({"delta_bits": 3}, "delta_bits is 3"),
    ],
)  # fmt: skip
def test_validate_names_row_and_entry(device: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"not a macko weight: .*{message}"):
        corrupted(**changes).to(device).validate()


def test_tensors_on_two_devices() -> None:
    corrupted().validate()  # which without changes is none
    with pytest.raises(ValueError, match="its tensors are on cpu and meta"):
        corrupted(deltas=torch.zeros(4, dtype=torch.uint8, device="meta")).validate()


# Every format: fields that lie. Nothing is allocated or divided by what only the file says.

#: The first weight of each format that has any content.
HONEST: dict[str, Any] = {name: next(w for w in honest() if w.format == name and w.rows > 1) for name in FORMATS}
FIELDS = [(name, field.name) for name in FORMATS for field in dataclasses.fields(FORMATS[name])]
SIZE_FIELDS = [place for place in FIELDS if place[1] in HONEST[place[0]].sizes()]
TENSOR_FIELDS = [place for place in FIELDS if place[1] in HONEST[place[0]].tensors()]


def refused(name: str, field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"not an? {name} weight: .*{message}"):
        dataclasses.replace(HONEST[name], **{field: value}).validate()


@pytest.mark.parametrize(("name", "field"), SIZE_FIELDS)
@pytest.mark.parametrize("value", [True, 1.0, None, "4", -1, -(2**31), 2**31, 2**63, 10**30])
def test_a_size_is_a_whole_number_in_its_range(name: str, field: str, value: Any) -> None:
    allowed = FORMATS[name].limits.get(field, ())
    if type(value) is not int or value not in allowed:  # else a range is gone through, which may be 2^32 long
        refused(name, field, value, f"{field} is {value!r}, expected ")


@pytest.mark.parametrize(("name", "field"), SIZE_FIELDS)
@pytest.mark.parametrize("value", [0, 2**31 - 2, 2**31 - 1])
def test_a_size_that_the_tensors_do_not_bear_out(name: str, field: str, value: int) -> None:
    """A process is killed, where memory is taken for it first. What is still a weight holds what it held."""
    changed = dataclasses.replace(HONEST[name], **{field: value})
    if changed.sizes() != HONEST[name].sizes() and (name, field, value > 0) != ("macko", "cols", True):  # empty columns
        with pytest.raises(ValueError, match=f"not an? {name} weight"):
            changed.validate()


@pytest.mark.parametrize(("name", "field"), TENSOR_FIELDS)
def test_a_tensor_of_another_kind(name: str, field: str) -> None:
    """All but contiguous, aligned, strided tensors of one device and the right type and dimensions."""
    good = getattr(HONEST[name], field)
    refused(name, field, None, f"{field} is None, expected a Tensor")
    refused(name, field, [1, 2], f"{field} is ")
    rest = "cpu and " if len(HONEST[name].tensors()) > 1 else ""
    refused(name, field, good.to("meta"), f"its tensors are on {rest}meta")
    refused(name, field, good.to(torch.float64), "")
    refused(name, field, good.to(torch.complex64), "")
    refused(name, field, good.float().to_sparse(), f"{field} is a sparse or nested tensor")
    refused(name, field, good.reshape(*good.shape, 1, 1), "")
    if good.numel() > 1:
        refused(name, field, good.reshape(-1)[:-1], "")
        refused(name, field, torch.stack([good, good], -1)[..., 0], "")
    if good.element_size() > 1 and good.numel():
        memory = torch.cat([torch.zeros(1, dtype=torch.uint8), good.reshape(-1).view(torch.uint8)])
        numbers = torch.from_numpy(memory[1:].numpy().view(f"i{good.element_size()}"))
        shifted = numbers.view(good.dtype).reshape(good.shape)
        refused(name, field, shifted, f"{field} begins at an address")


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_without_content(name: str) -> None:
    with pytest.raises(ValueError, match="its tensors are on meta"):
        dataclasses.replace(HONEST[name], **{n: t.to("meta") for n, t in HONEST[name].tensors().items()}).validate()


LAYOUTS = [name for name, kind in FORMATS.items() if kind.is_layout or kind.saved_dense or issubclass(kind, ByteWeight)]
NEVER_SAVED = "is an execution layout, never saved"


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_in_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    about = {"format": name, **HONEST[name].sizes()}
    path = tmp_path / "model.safetensors"
    metadata = {"macko": json.dumps({"version": 1, "layers": {"up": about}})}
    save_file({f"up.{n}": t.contiguous() for n, t in HONEST[name].tensors().items()}, path, metadata=metadata)
    with pytest.raises(ValueError, match=rf"model\.safetensors: layers\['up'\]: {name} {NEVER_SAVED}"):
        Checkpoint(path)
    transformers = pytest.importorskip("macko.integrations.transformers")
    with pytest.raises(ValueError, match=rf"quantization_config: layers\['up'\]: {name} {NEVER_SAVED}"):
        transformers.MackoConfig(layers={"up": about})


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_in_a_state_dict_are_refused_by_name(name: str) -> None:
    """Once it ran, and could not be saved: delta_bits, which no layout runs by, was believed."""
    packed = HONEST[name]
    layer = SparseLinear(packed.cols, packed.rows, bias=False, dtype=packed.dtype)
    about = {"format": name, **packed.sizes(), "delta_bits": 5}
    with pytest.raises(RuntimeError, match=f"{name} {NEVER_SAVED}"):
        layer.load_state_dict({**packed.tensors(), "_extra_state": as_extra_state(about)})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_in_a_layout_saves_the_canonical_format(device: str) -> None:
    packed = MackoWeight.from_dense(random_weight(9, 70, 0.4, torch.float16))
    layer = SparseLinear.from_packed(BitmapWeight.from_macko(packed)).to(device)
    state = layer.state_dict()
    assert json.loads(bytes(layer.get_extra_state().tolist()))["format"] == "bitmap"
    assert set(state) == {"values", "deltas", "row_ptr", "_extra_state", "weight"}
    again = SparseLinear(70, 9, bias=False, dtype=torch.float16, device=device)
    again.load_state_dict(state)
    if device == "cpu":
        assert_same_bits(again.weight.as_subclass(Tensor), packed.to_dense())


@pytest.mark.parametrize("strict", [True, False])
def test_a_part_of_a_packed_weight_is_not_loaded(strict: bool) -> None:
    """Nor what lies under the names of its own format while the state tells of another: nobody has looked at it."""
    packed = MackoWeight.from_dense(random_weight(9, 70, 0.4, torch.float16))
    for about, dropped in (
        ({"format": "ec", "rows": 9, "cols": 70}, "block_values"),
        ({"format": "macko", "rows": 9, "cols": 70}, "values"),
    ):
        layer = SparseLinear.from_packed(packed)
        state = {**layer.state_dict(), "row_ptr": packed.row_ptr.flip(0), "_extra_state": as_extra_state(about)}
        state.pop(dropped, None)
        with pytest.raises(RuntimeError, match=f"the state has no {dropped}.* of its {about['format']} weight"):
            layer.load_state_dict(state, strict=strict)
        assert_same_bits(layer.row_ptr, packed.row_ptr)
    SparseLinear.from_packed(packed).load_state_dict({}, strict=False)


def test_an_extra_state_that_is_one_large_number() -> None:
    """bytes(n) is n zeros."""
    layer = SparseLinear.from_linear(nn.Linear(8, 4))
    with pytest.raises(RuntimeError, match="_extra_state does not say"):
        layer.load_state_dict({**layer.state_dict(), "_extra_state": torch.tensor(2**40)})


# Few rows or columns: a layout fills them up to whole blocks.


@pytest.mark.parametrize("format", [*CHOICES, *(name for name, kind in FORMATS.items() if "cpu" in kind.device_types)])
def test_a_dense_and_a_canonical_weight_are_packed_alike(format: str) -> None:
    dtype = FORMATS[format].dtypes[0] if format in FORMATS else torch.float16
    for w in (random_weight(96, 130, 0.4, dtype), random_weight(96, 130, 1.0, dtype)):
        w[:, ::4], w[:, 1::4] = 0, 0  # of 2:4, and with half of its non-zeros
        packed, again = (pack(source, Options(format)) for source in (w, MackoWeight.from_dense(w)))
        assert packed.label == again.label
        for held in (packed, again):
            assert_same_bits(held.to_dense(), w if held.lossless else packed.to_dense())


@pytest.mark.parametrize("tokens", [None, 8])
def test_auto_takes_no_layout_that_is_mostly_padding(tokens: int | None) -> None:
    for rows, cols in ((400, 8), (3, 3)):
        linear = nn.Linear(cols, rows, dtype=torch.float16)
        canonical = MackoWeight.smallest(linear.weight.detach())
        assert BitmapWeight.from_macko(canonical).nbytes > 1.05 * canonical.nbytes
        assert pack(canonical, Options(tokens=tokens)).format == "macko"
        assert SparseLinear.from_linear(linear).format == "macko"
    canonical = MackoWeight.smallest(random_weight(400, 512, 0.6, torch.float16))
    assert pack(canonical, Options(tokens=tokens)).format == "bitmap"


def test_ops_are_few() -> None:
    """A new layout is a row of a table, no new op; and an op takes a packed weight as two arguments."""
    schemas = [getattr(torch.ops.macko, name).default._schema for name in _library.op_names]
    assert len(schemas) <= 18
    assert sum(len(schema.arguments) for schema in schemas) <= 90
    for schema in schemas:
        names = [argument.name for argument in schema.arguments]
        if "header" in names:
            at = names.index("header")
            assert (names[at - 1], str(schema.arguments[at - 1].type)) == ("packed", "List[Tensor]")
            assert str(schema.arguments[at].type) == "List[int]"


@pytest.mark.parametrize("merge", [False, True])
def test_forward_mode_is_refused(merge: bool) -> None:
    """It would be lost: torch.func.jvp gave zeros."""
    layers = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in ("q_proj", "k_proj", "v_proj")})
    for layer in layers.values():
        layer.weight.data[:, ::2] = 0
    sparsify_(layers, merge=merge)
    x = torch.randn(3, 64)
    for layer in layers.values():
        assert isinstance(layer, SparseLinear)
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            torch.func.jvp(layer, (x,), (x,))
        with torch.autograd.forward_ad.dual_level():  # another input has no tangent
            layer(x)


@pytest.mark.parametrize("name", ["tile", "sparse11", "sparse8"])
def test_content_that_nobody_wrote_is_refused_on_a_cpu(name: str) -> None:
    """As to_empty leaves it: where slabs lie is content, too."""
    layer = SparseLinear.from_linear(nn.Linear(256, 128, bias=False).bfloat16(), name).to("meta").to_empty(device="cpu")
    for buffer in layer.buffers():
        buffer.view(torch.uint8).random_(0, 256)
    layer.packed.tensors().get("scales", torch.ones(())).fill_(1)
    with pytest.raises(RuntimeError, match="content breaks the format's rule"):
        layer(torch.ones(2, 256, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="content breaks the format's rule"):
        layer.packed.to_dense()


def test_what_has_no_gradients_says_so() -> None:
    packed = MackoWeight.from_dense(random_weight(72, 64, 0.5, torch.float32))
    x, weight = torch.randn(2, 64, requires_grad=True), torch.ones(64)
    for call in (lambda: packed.norm_linear(x, weight, 1e-5), lambda: packed.gated_linear(weight.expand(2, 64), x)):
        with pytest.raises(NotImplementedError, match="has no gradients"):
            call()
        with pytest.raises(RuntimeError, match="the macko layout has no such kernel here"), torch.no_grad():
            call()
    sum(part.sum() for part in packed.linear_parts(x, (8, 64))).backward()  # slices of linear, which has
    torch.testing.assert_close(x.grad, packed.to_dense().sum(0).expand(2, 64))


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if "cpu" in FORMATS[name].device_types or name in ("tile", "sparse11")]
)
def test_a_wrong_header_is_an_error(name: str) -> None:
    """What stood in the schemas of ops once: no number and no list of tensors reaches a kernel that does not fit."""
    w = torch.where(torch.rand(72, 130) < 0.5, torch.randn(72, 130), 0.0).to(FORMATS[name].dtypes[0])
    tensors, header = FORMATS[name].from_dense(w).packed
    x, macko = torch.randn(3, 130).to(w.dtype), torch.ops.macko
    calls = [lambda t, h: macko.check(t, h)] if name != "slide" else []
    if name not in ("tile", "ec", "dense12", "sparse11", "sparse8"):  # those trust the content once it is checked
        calls += [lambda t, h: macko.dense(t, h), lambda t, h: macko.linear(x, t, h, None)]
    numbers = [-(2**63), -1, 0, 1, 2, 3, 7, 71, 73, 129, 131, 2**31 - 1, 2**31, 2**63 - 1]
    wrong: list[tuple[Any, Any]] = [
        (tensors, [*header[:i], n, *header[i + 1 :]]) for i in range(len(header)) for n in numbers
    ]
    wrong += [(tensors, header[:i]) for i in range(len(header))] + [(tensors, [*header, 0])]
    wrong += [(tensors[:i], header) for i in range(len(tensors))] + [([*tensors, tensors[0]], header)]
    wrong += [([*tensors[:i], t, *tensors[i + 1 :]], header) for i in range(len(tensors)) for t in tensors]
    wrong += [([*tensors[:i], tensors[i][1:], *tensors[i + 1 :]], header) for i in range(len(tensors))]
    refused = 0
    for given, numbers_ in wrong:
        for call in calls:
            try:
                found = call(given, numbers_)
            except RuntimeError as error:
                assert "macko::" in str(error) or "new_empty" in str(error)  # noqa: PT017  too large to hold
                refused += 1
            else:
                assert found.shape in ((4,), (numbers_[1], numbers_[2]), (3, numbers_[1]))
    assert refused >= (len(header) + len(tensors) + 2) * len(calls)  # too few or too many of them, at least


def without_elements(t: Tensor) -> list[Tensor]:
    """Of one number, of none, and of none in any one of its dimensions; not what t is already."""
    shapes = [(), (0,), *((*t.shape[:dim], 0, *t.shape[dim + 1 :]) for dim in range(t.dim()))]
    return [t.new_zeros(shape) for shape in shapes if shape != t.shape]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", FORMATS)
def test_tensors_of_no_dimension_or_no_elements_are_named_by_every_op(name: str, device: str) -> None:
    on_device = device in FORMATS[name].device_types or name in ("tile", "sparse11")
    if name == "sell" and device == "cpu":
        packed = HONEST[name]
    elif on_device:
        w = torch.where(torch.rand(72, 136) < 0.5, torch.randn(72, 136), 0.0).to(FORMATS[name].dtypes[0])
        packed = FORMATS[name].from_dense(w.to(device))
    else:
        pytest.skip(f"{name} runs on {FORMATS[name].device_types}")
    tensors, header = packed.packed
    rows, cols, op = packed.rows, packed.cols, torch.ops.macko
    x = torch.randn(3, cols).to(packed.dtype).to(device)
    one, norm = x[0], torch.ones_like(x[0])
    calls: dict[str, Any] = {
        "dense": lambda t: op.dense(t, header),
        "check": lambda t: op.check(t, header),
        "linear": lambda t: op.linear(x, t, header),
        "linear, one token": lambda t: op.linear_below_autograd(one, t, header),
        "linear_parts": lambda t: op.linear_parts(x, t, header, [1, rows - 1]),
        "norm_linear": lambda t: op.norm_linear(one, norm, 1e-5, t, header),
        "gated_linear": lambda t: op.gated_linear(one, one, t, header),
        "to canonical": lambda t: op.lay_out(t, header, 0, []),
        "to bitmap": lambda t: op.lay_out(t, header, FORMATS["bitmap"].number, []),
        "to tile": lambda t: op.lay_out(t, header, FORMATS["tile"].number, []),
    }
    if isinstance(packed, MackoWeight):
        bits = packed.delta_bits
        calls |= {
            "unpack": lambda t: ops.unpack(*t, cols, bits),
            "ops.check": lambda t: ops.check(*t, cols, bits),
            "ops.linear": lambda t: ops.linear(x, *t, cols, None, bits),
            "spmv": lambda t: ops.spmv(*t, cols, one, bits),
        }
    if name == "ec":
        calls |= {
            "ec_spmv": lambda t: ops.ec_spmv((*t, rows, cols), one),
            "ec_unpack": lambda t: ops.ec_unpack((*t, rows, cols)),
        }
    if isinstance(packed, SlideWeight):
        n, dtype = packed.n, ops.SLIDE_ELEMENTS[packed.element]
        calls |= {
            "slide_linear": lambda t: ops.slide_linear(x, t[0], t[1], cols, n, dtype),
            "slide_unpack": lambda t: ops.slide_unpack(t[0], t[1], cols, n, dtype),
        }
    asked = 0
    for call in calls.values():
        try:
            call(tensors)
        except RuntimeError as error:
            refused = str(error)
            assert re.search("no such kernel|is for a GPU|is for the CPU|expected the canonical", refused), refused
            continue
        for i, field in enumerate(packed.tensors()):
            if field == "dense_tiles":
                continue  # is no argument, nor looked at
            for wrong in without_elements(tensors[i]):
                if field == "col_order" and wrong.shape == (0,):
                    continue  # says that columns are in order
                with pytest.raises(RuntimeError, match=rf"\b{'packed' if field == 'tiles' else field}\b"):
                    call([*tensors[:i], wrong, *tensors[i + 1 :]])
                asked += 1
    assert asked > 2 or name == "sell"


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
def test_shapes_that_compile_expects_are_those_of_what_is_packed(device: str) -> None:
    w = random_weight(70, 300, 0.4, torch.float16).bfloat16().to(device, torch.float16)  # which sparse11 holds, too
    canonical = MackoWeight.from_dense(w)
    for options in ([0], [4]):
        torch.library.opcheck(torch.ops.macko.pack, (w, MackoWeight.number, options))
    torch.library.opcheck(torch.ops.macko.pack, (w, EcWeight.number, [0, 8, 1, 128, 8192, 128, 1]))
    torch.library.opcheck(torch.ops.macko.pack, (w.bfloat16(), Dense12Weight.number, []), test_utils="test_faketensor")
    for kind in FORMATS.values():
        if kind.is_layout and kind.runs(torch.device(device), w.dtype, 300):
            cut = [0, 0, 0] if kind is SellWeight else []
            # Not whether compiled code gives the same: bits of gaps and masks are NaN as numbers.
            torch.library.opcheck(
                torch.ops.macko.lay_out, (*canonical.packed, kind.number, cut), test_utils="test_faketensor"
            )
    if device == "cpu":
        bitmap = BitmapWeight.from_macko(canonical)
        torch.library.opcheck(torch.ops.macko.lay_out, (*bitmap.packed, MackoWeight.number, []))
