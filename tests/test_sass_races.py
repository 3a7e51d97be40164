"""That verify/sass_races.py tells an arrival that can overtake a load from one that cannot."""

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


#: Of instructions, each with the scoreboards waited for and its own: the loads in flight at an arrival. Labels at end.
WAIT, ARRIVAL = (USE, 2, NO_SCOREBOARD), (ARRIVE, 0, NO_SCOREBOARD)
BEHIND, MAYBE = (LDS, 0, 3), (f"{LDS} ?", 0, 3)  # the second may not have been executed
AROUND = [(LDS, 0, 1), ("BRA `(.L_end) ?", 0, 7), (USE, 2, 7), (ARRIVE, 0, 7), ("EXIT", 0, 7)]
AROUND_BY_P1 = [AROUND[0], ("BRA P1, `(.L_end)", 0, 7), *AROUND[2:]]
DIVERGED = [
    *(("BSSY B0, `(.L_met)", 0, 7), (LDS, 0, 1), ("BSYNC B0", 0, 7), (ARRIVE, 0, 7), ("EXIT", 0, 7)),
    *((USE, 2, 7), (ARRIVE, 0, 7)),
]
PROGRAMS: dict[str, tuple[list[tuple[str, int, int]], dict[str, int], list[tuple[int, int]]]] = {
    **{
        f"{arrival} before the load is waited for": ([(LDS, 0, 1), (arrival, 0, NO_SCOREBOARD), WAIT], {}, [(0, 1)])
        for arrival in (ARRIVE, "BAR.ARV 0x1, 0x80", "UCGABAR_ARV", f"{ARRIVE} ?")
    },
    "arrival after the wait": ([(LDS, 0, 1), WAIT, ARRIVAL], {}, []),
    "an arrival that waits": ([(LDS, 0, 1), (ARRIVE, 2, NO_SCOREBOARD)], {}, []),
    "a wait by itself": ([(LDS, 0, 1), ("DEPBAR.LE SB1, 0x0", 0, NO_SCOREBOARD), ARRIVAL], {}, []),
    **{
        f"{fence} between them": ([(LDS, 0, 1), (fence, 0, NO_SCOREBOARD), ARRIVAL], {}, found)
        for name in ("FENCE.VIEW.ASYNC.S", "MEMBAR.ALL.CTA")
        for fence, found in ((name, []), (f"{name} ?", [(0, 2)]))
    },
    "wait for another scoreboard": ([(LDS, 0, 1), (USE, 4, NO_SCOREBOARD), ARRIVAL], {}, [(0, 2)]),
    "a load after it is over": ([(LDS, 0, 7), BEHIND, (USE, 8, NO_SCOREBOARD), ARRIVAL], {}, []),
    "a load before it is over": ([BEHIND, (LDS, 0, 7), (USE, 8, NO_SCOREBOARD), ARRIVAL], {}, [(1, 3)]),
    "one that may have been is over": ([(LDS, 0, 7), MAYBE, (USE, 8, NO_SCOREBOARD), ARRIVAL], {}, [(0, 3)]),
    "a path around the wait": (AROUND, {"end": 3}, [(0, 3)]),
    "a path around wait and arrival": (AROUND, {"end": 4}, []),
    "a path around by a predicate": (AROUND_BY_P1, {"end": 3}, [(0, 3)]),
    "a load of the round before": ([(ARRIVE, 0, 7), (LDS, 0, 1), ("BRA `(.L_top)", 0, 7)], {"top": 0}, [(1, 0)]),
    "diverged lanes that meet at the wait": (DIVERGED, {"met": 5}, []),
    "diverged lanes that meet after it": (DIVERGED, {"met": 6}, [(1, 6)]),
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_an_arrival_that_can_overtake_a_load(what: str) -> None:
    lines, labels, wanted = PROGRAMS[what]
    assert found_in(*lines, **labels) == wanted


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
