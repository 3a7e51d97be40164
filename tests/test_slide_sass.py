"""The machine code of slide's kernel for GPUs without wgmma: how much of its loop is not products."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_sass_races import find_nvdisasm
from verify.sass_diff import ROOT, cubins

SIZES = ("SLIDE_256x128", "SLIDE_128x128")
UNIT = """
#include "{root}/csrc/slide/gemm_mma_cuda.cuh"
namespace macko {{
template __global__ void slide_mma_kernel<MACKO_SLIDE_S8, SLIDE_SPARSE, {size}>(const __grid_constant__ mma_task);
}}
"""


def loop_of(sass: str) -> list[str]:
    """The instructions of the shortest loop with products, as nvdisasm prints them."""
    lines = [line.strip() for line in sass.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.startswith(".L_") and line.endswith(":")}
    loops = []
    for at, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        if target and labels.get(target[1], at) < at:
            body = lines[labels[target[1]] : at + 1]
            found = [text for line in body for text in re.findall(r"^/\*[0-9a-f]+\*/\s+(.*?);", line)]
            loops.append([text for text in found if "NOP" not in text])
    return min((loop for loop in loops if any("IMMA" in text for text in loop)), key=len)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("nvcc") and find_nvdisasm()), reason="needs nvcc and nvdisasm")
@pytest.mark.parametrize("size", SIZES)
def test_a_product_takes_two_and_a_half_instructions(size: str, tmp_path: Path) -> None:
    """Of sm_80. It was 8.1 while the loop worked out addresses, and then these were the time."""
    (tmp_path / "unit.cu").write_text(UNIT.format(root=ROOT, size=size))
    ((_, cubin),) = cubins(tmp_path, ["unit.cu"], "sm_80", "nvcc", tmp_path)
    nvdisasm = find_nvdisasm()
    assert nvdisasm
    sass = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
    loop = loop_of(sass)
    products = sum("IMMA.SP" in text for text in loop)
    assert products == 64
    assert len(loop) <= 2.5 * products
    assert not any(re.search(r"\b(LDL|STL)\b", text) for text in loop)  # nothing is spilled in it
