"""That verify/sass_races.py tells an arrival that can overtake a load from one that cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("elftools")

from verify import sass_races
from verify.sass_races import NO_SCOREBOARD, Instruction, overtaken

LDS, ARRIVE, USE = "LDS R2, [R3]", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", "FADD R5, R2, R2"


def program(*lines: tuple[str, int, int]) -> list[Instruction]:
    """Of text, mask of the scoreboards waited for, and own scoreboard, 16 bytes each."""
    return [Instruction(16 * i, text, waits, scoreboard, ()) for i, (text, waits, scoreboard) in enumerate(lines)]


def found_in(*lines: tuple[str, int, int], **labels: int) -> list[tuple[int, int]]:
    found = overtaken(program(*lines), {f".L_{name}": 16 * index for name, index in labels.items()})
    return [(both.load.address // 16, both.arrival.address // 16) for both in found]


@pytest.mark.parametrize("arrival", [ARRIVE, "BAR.ARV 0x1, 0x80", "UCGABAR_ARV", f"{ARRIVE} ?"])
def test_arrival_before_the_load_is_waited_for(arrival: str) -> None:
    assert found_in((LDS, 0, 1), (arrival, 0, NO_SCOREBOARD), (USE, 2, NO_SCOREBOARD)) == [(0, 1)]


def test_arrival_behind_the_wait() -> None:
    assert not found_in((LDS, 0, 1), (USE, 2, NO_SCOREBOARD), (ARRIVE, 0, NO_SCOREBOARD))
    assert not found_in((LDS, 0, 1), (ARRIVE, 2, NO_SCOREBOARD))
    assert not found_in((LDS, 0, 1), ("DEPBAR.LE SB1, 0x0", 0, NO_SCOREBOARD), (ARRIVE, 0, NO_SCOREBOARD))


def test_a_fence_between_them() -> None:
    for fence in ("FENCE.VIEW.ASYNC.S", "MEMBAR.ALL.CTA"):
        assert not found_in((LDS, 0, 1), (fence, 0, NO_SCOREBOARD), (ARRIVE, 0, NO_SCOREBOARD))
        assert found_in((LDS, 0, 1), (f"{fence} ?", 0, NO_SCOREBOARD), (ARRIVE, 0, NO_SCOREBOARD)) == [(0, 2)]


def test_wait_for_another_scoreboard() -> None:
    assert found_in((LDS, 0, 1), (USE, 4, NO_SCOREBOARD), (ARRIVE, 0, NO_SCOREBOARD)) == [(0, 2)]


def test_a_load_is_over_with_one_behind_it_and_not_with_one_before_it() -> None:
    first, second = (LDS, 0, NO_SCOREBOARD), (LDS, 0, 3)
    use, arrive = (USE, 8, NO_SCOREBOARD), (ARRIVE, 0, NO_SCOREBOARD)
    assert not found_in(first, second, use, arrive)
    assert found_in(second, first, use, arrive) == [(1, 3)]
    assert found_in(first, (f"{LDS} ?", 0, 3), use, arrive) == [(0, 3)]  # may not have been executed


def test_a_path_around_the_wait() -> None:
    lines = [(LDS, 0, 1), ("BRA `(.L_end) ?", 0, 7), (USE, 2, 7), (ARRIVE, 0, 7), ("EXIT", 0, 7)]
    assert found_in(*lines, end=3) == [(0, 3)]
    assert not found_in(*lines, end=4)
    lines[1] = ("BRA P1, `(.L_end)", 0, 7)
    assert found_in(*lines, end=3) == [(0, 3)]


def test_a_load_of_the_round_before() -> None:
    """The arrival stands before the load, in a loop."""
    assert found_in((ARRIVE, 0, 7), (LDS, 0, 1), ("BRA `(.L_top)", 0, 7), top=0) == [(1, 0)]


def test_diverged_lanes_meet_where_they_said() -> None:
    lines = [
        ("BSSY B0, `(.L_met)", 0, 7),
        (LDS, 0, 1),
        ("BSYNC B0", 0, 7),
        (ARRIVE, 0, 7),
        ("EXIT", 0, 7),
        (USE, 2, 7),
        (ARRIVE, 0, 7),
    ]
    assert not found_in(*lines, met=5)
    assert found_in(*lines, met=6) == [(1, 6)]


def find_nvdisasm() -> str | None:
    try:
        return sass_races.find_nvdisasm()
    except SystemExit:
        return None


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("nvcc") and find_nvdisasm()), reason="needs nvcc and nvdisasm")
def test_arrivals_in_what_nvcc_makes(tmp_path: Path) -> None:
    source = tmp_path / "ring.cu"
    source.write_text(
        """
        __device__ void arrive(unsigned barrier) {
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier));
        }
        __device__ float load(unsigned at) {
            float v;
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
            return v;
        }
        extern "C" __global__ void early(float *y, unsigned at, unsigned barrier) {
            const float v = load(at);
            arrive(barrier);
            *y = v;
        }
        extern "C" __global__ void late(float *y, unsigned at, unsigned barrier) {
            const float v = load(at);
            *y = v;
            if (v != 2) arrive(barrier);
        }
        """
    )
    nvdisasm = find_nvdisasm()
    assert nvdisasm
    ((_, cubin),) = sass_races.cubins(tmp_path, ["ring.cu"], "sm_90a", "nvcc", tmp_path, "-lineinfo")
    found = sass_races.races(cubin, nvdisasm)
    assert {name: (arrivals, len(both)) for name, (arrivals, both) in found.items()} == {
        "early": (1, 1),
        "late": (1, 0),
    }
    (both,) = found["early"][1]
    assert "asm volatile" in sass_races.source_of(both.load)
