"""Do the tests notice? Plants one fault at a time into a copy of the source and runs the quick tests of its subject.

    python -m verify.mutate [--only TEXT] [--log FILE] [--out FILE]

A fault is in CPU code or Python; where it is in C the CPU library is built again. Caught: a test that passes without
the fault fails, crashes, or runs too long with it. Prints a table; the exit code is 1 where a fault survives, and 2
where the tests fail without one, or a fault's text is not there just once or does not compile. `make mutants` runs all
of them; with `--log` a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path("macko/_C.abi3.so")


@dataclasses.dataclass(frozen=True)
class Fault:
    """`old`, which is in `file` once, becomes `new`; `tests` are files, or names within them."""

    what: str
    file: str
    old: str
    new: str
    tests: str
    path: str = ""  #: of MACKO_CPU, without which no test can notice: avx512


FAULTS = (
    Fault("scalar product reads one column too far", "csrc/macko/spmv_cpu.c", "if (next > c->m->cols) return -1;",
          "if (next > c->m->cols + 1) return -1;",
          "tests/test_macko.py::test_one_column_less_than_there_are_entries_for"),
    Fault("AVX2 product reads one column too far", "csrc/macko/spmv_cpu.c",
          "if (next > m->cols) return 0;\n/* Place", "if (next > m->cols + 1) return 0;\n/* Place",
          "tests/test_macko.py::test_one_column_less_than_there_are_entries_for"),
    Fault("AVX-512 product reads one column too far", "csrc/macko/spmv_cpu.c", "if (end > m->cols) return -1;",
          "if (end > m->cols + 1) return -1;", "tests/test_macko.py::test_one_column_less_than_there_are_entries_for",
          path="avx512"),
    Fault("a product is rounded before the bias, and after it", "csrc/macko/spmv_cpu.c",
          "macko_store(y, m->dtype, row, bias ? sum + macko_load(bias, m->dtype, row) : sum);",
          "macko_store(y, m->dtype, row, sum); "
          "if (bias) macko_store(y, m->dtype, row, macko_load(y, m->dtype, row) + macko_load(bias, m->dtype, row));",
          "tests/test_rounding.py::test_a_bias_is_added_before_the_only_rounding"),
    Fault("the longest run has an explicit zero", "csrc/macko/pack_cpu.c", "for (; at - r->next > delta_max;",
          "for (; at - r->next >= delta_max;", "tests/test_macko.py::test_runs_of_zeros_about_delta_max"),
    Fault("unpacking forgets the zeros after the last group", "csrc/macko/pack_cpu.c",
          "memset(w + at.next * size, 0, (size_t)((m->cols - at.next) * size));",
          "memset(w + at.next * size, 0, (size_t)((m->cols - at.next) * size) / 2);",
          "tests/test_macko.py::test_runs_of_zeros_about_delta_max"),
    Fault("a share may have half slabs of two tiles of which a block has none", "csrc/slab/many_plan.c",
          "if (s->split_k == 1 || end != 1 || whole || head != 1) at += head;", "at += head;",
          "tests/kernels/test_tile.py::test_of_two_tiles_that_a_share_has_half_slabs_of_both_blocks_have_some"),
    Fault("split tiles are thought to cost no more beyond L2", "csrc/slab/many_plan.c", "? 155 :", "? 101 :",
          "tests/kernels/test_tile.py::test_tiles_are_split_only_where_it_pays_beyond_l2"),
    Fault("the energy of blocks does not count", "csrc/slab/many_plan.c", "PRODUCTS = 108", "PRODUCTS = 0",
          "tests/kernels/test_tile.py::test_of_plans_that_take_about_as_long_the_one_of_less_energy_is_taken"),
    Fault("what is given away costs a plan no energy", "csrc/slab/many_plan.c", "GIVING = 154", "GIVING = 0",
          "tests/kernels/test_tile.py::test_of_plans_that_take_about_as_long_the_one_of_less_energy_is_taken"),
    Fault("the raster follows no period of split tiles", "csrc/slab/many_plan.c", "tiles < 3 ? RASTER_ROWS : tiles",
          "RASTER_ROWS", "tests/kernels/test_tile.py::test_split_tiles_are_shared_so_that_nobody_waits_long"),
    Fault("what is given comes before whole tiles", "csrc/slab/schedule.h", "const bool whole = half < share->whole;",
          "const bool whole = half >= share->half_slabs - share->whole;",
          "tests/kernels/test_tile.py::test_plans_cover_every_half_slab_once_and_wait_for_nobody_later"),
    Fault("an expert of another process has a place", "csrc/experts/experts_cpu.c",
          "p->places[pair] = expert < p->experts ? place : -1;", "p->places[pair] = place;",
          "tests/test_experts.py::test_pairs_are_sorted_by_expert"),
    Fault("a token's experts add up without a rounding between", "csrc/experts/experts_cpu.c",
          "if (product != MACKO_F32)", "if (0)",
          "tests/test_experts.py::test_a_tokens_experts_add_up_with_torchs_roundings"),
    Fault("a row in order is that of the pair's number", "csrc/slab/experts_ops.h",
          "std::copy_n(reads<char>(x) + pair / top_k * bytes", "std::copy_n(reads<char>(x) + pair % top_k * bytes",
          "tests/test_experts.py::test_an_order_takes_rows_of_x_where_they_are"),
    Fault("ec's product loses the bias", "contrib/ec/spmv_cpu.c", "bias ? sum + macko_load(bias, m->dtype, row) : sum",
          "sum", "tests/test_rounding.py::test_a_bias_is_added_before_the_only_rounding"),
    Fault("ec: the last piece of a row replaces the others", "contrib/ec/spmv_cpu.c",
          "row_sums[row - first_row] += sum;", "row_sums[row - first_row] = sum;",
          "tests/test_ec.py::test_every_shape"),
    Fault("ec's check takes a row of another tile", "contrib/ec/pack_cpu.c",
          "row >= num_rows || seen[row]", "row > num_rows || seen[row]",
          "tests/test_ec.py::test_validate_names_what_is_wrong"),
    Fault("ec's check takes a first delta that is not zero", "contrib/ec/pack_cpu.c",
          "i < bit + set->delta_bits; i++", "i < bit + set->delta_bits - 1; i++",
          "tests/test_ec.py::test_validate_names_what_is_wrong"),
    Fault("bitmap's check takes rows into the padding", "csrc/bitmap/pack_cpu.c",
          "if (stop < start || stop > m->capacity - MACKO_BITMAP_PAD)", "if (stop < start || stop > m->capacity)",
          "tests/test_bitmap.py::test_corrupted_content_is_refused"),
    Fault("bitmap's check takes too few bits", "csrc/bitmap/pack_cpu.c", "if (count != stop - start)",
          "if (count > stop - start)", "tests/test_bitmap.py::test_corrupted_content_is_refused"),
    Fault("bitmap's check leaves out the last value of the padding", "csrc/bitmap/pack_cpu.c",
          "byte < m->capacity * size", "byte < (m->capacity - 1) * size",
          "tests/test_bitmap.py::test_validate_finds_what_does_not_stop_the_reading"),
    Fault("tile's check takes a stored zero", "csrc/codecs/tile/pack_cpu.c", "filled ? !(value & (SIGN - 1)) : value",
          "!filled && value", "tests/kernels/test_slabs.py::test_validate_names_what_is_wrong"),
    Fault("tile's check takes a row after the last one", "csrc/codecs/tile/pack_cpu.c",
          "if (row + macko_slab_row(lane, bit / 8) < m->rows", "if (row + macko_slab_row(lane, bit / 8) <= m->rows",
          "tests/kernels/test_tile.py::test_a_value_just_outside_is_refused"),
    Fault("the table of codes forgets which of equal ones is lower", "csrc/slab/table.c", "counts[high] > (commonest",
          "counts[high] >= (commonest",
          "tests/kernels/test_slabs.py::test_the_table_has_the_commonest_and_of_equal_ones_the_lower"),
    Fault("dense12's check takes an entry twice", "csrc/codecs/dense12/pack_cpu.c", "int bad = place <= before",
          "int bad = place < before", "tests/kernels/test_slabs.py::test_validate_names_what_is_wrong"),
    Fault("dense12's check takes a part after the slab", "csrc/codecs/dense12/pack_cpu.c",
          "|| bounds >> 16 > most", "", "tests/kernels/test_slabs.py::test_validate_names_what_is_wrong"),
    Fault("dense12 is saved packed", "macko/weights/slab.py",
          'return torch.empty(self.shape, dtype=self.dtype, device="meta") if on_meta else self.to_dense().cpu()',
          "return self",
          "tests/test_compress.py::test_a_state_is_the_dense_models_and_loaded_into_either"),
    Fault("a vector path lists what the table has", "csrc/planes12/pack_cpu.c", "held = _mm256_or_si256(held, is);", "",
          "tests/test_planes.py::test_vector_and_scalar_write_the_same_bytes"),
    Fault("planes take a column twice", "csrc/planes12/pack_cpu.c", "if (col <= (i > start", "if (col < (i > start",
          "tests/test_planes.py::test_a_column_twice_in_a_row_is_named"),
    Fault("columns of planes are cut with the nibbles of their neighbours", "macko/weights/planes.py",
          "        if start % 2:", "        if False:", "tests/test_planes.py::test_cuts_are_the_dense_cuts"),
    Fault("back to dense without a look at the checksum", "macko/integrations/folders.py",
          "if wanted not in (None, checksum(weight)):", "if False:",
          "tests/test_planes.py::test_other_bits_than_were_packed_are_found"),
    Fault("a row of scale 0 keeps its codes", "macko/integrations/compressed_tensors.py",
          "values.view(torch.uint8)[is_zero] = 0", "pass",
          "tests/test_checkpoints.py::test_codes_in_a_row_of_scale_0_are_zeros"),
    Fault("dense8 takes the first row's scale", "csrc/codecs/dense8/pack_cpu.c", "m->scales[at.row]", "m->scales[0]",
          "tests/kernels/test_slabs.py::test_bytes_and_round_trip_of_every_shape"),
    Fault("sparse8's check takes a zero", "csrc/codecs/sparse8/pack_cpu.c",
          "!macko_byte_is_zero(m->kind, code) && ", "",
          "tests/kernels/test_slabs.py::test_validate_names_what_is_wrong"),
    Fault("8 bits are rounded anew where a layer moves", "macko/weights/base.py",
          "return not self.is_layout\n", "return not self.is_layout and self.lossless\n",
          "tests/test_eight.py::test_a_layer_keeps_its_codes"),
    Fault("slide's bias is taken off", "csrc/slide/gemm_cpu.c", "scaled, bias_at(args, row + r)",
          "scaled, -bias_at(args, row + r)", "tests/test_slide.py::test_linear_within_its_bound"),
    Fault("slide's tokens have the scale of the first", "csrc/slide/gemm_cpu.c", "args->token_scale[token]",
          "args->token_scale[0]", "tests/test_slide.py::test_linear_within_its_bound"),
    Fault("tile's kernel for few tokens gets 65", "csrc/torch/path.h", "tokens <= few_tokens ||",
          "tokens <= few_tokens + 1 ||", "tests/test_path.py::test_tile_has_a_kernel_for_few_and_one_for_many"),
    Fault("a share that ends with a row block has the next one too", "csrc/slab/few_plan.h",
          "last + 1) < (nth + 1)", "last + 1) <= (nth + 1)",
          "tests/kernels/test_tile.py::test_shares_cover_every_slab_once_and_each_sum_is_sent_to_who_waits_for_it"),
    Fault("a knob is known by the beginning of its key", "csrc/core/knobs.c", " || KNOBS[id].key[key_length]", "",
          "tests/test_path.py::test_a_knob_that_there_is_not_is_an_error_and_changes_nothing"),
    Fault("a sibling called twice gets the same tensor", "macko/nn/merge.py", " or index in product[4]:", ":",
          "tests/test_merge.py::test_a_sibling_called_twice_gives_two_tensors"),
    Fault("a merged layer takes a bias that it does not add", "macko/nn/merge.py",
          'if name == "bias" and param is not None:', "if False:",
          "tests/test_merge.py::test_a_merged_layer_refuses_a_bias_that_it_would_not_add"),
    Fault("scales of 8 bits are of the default dtype", "macko/weights/codes.py",
          "torch.empty(len(w), dtype=torch.float32,",
          "torch.empty(len(w),", "tests/test_linear.py::test_the_default_dtype_changes_no_packed_weight"),
    Fault("siblings share a product of another input", "macko/nn/merge.py", " or product[1] is not x", "",
          "tests/test_merge.py::test_any_order_and_repeated_calls"),
    Fault("layers with a bias are merged, and lose it", "macko/nn/merge.py",
          "type(layer) is not SparseLinear or layer.bias is not None", "type(layer) is not SparseLinear",
          "tests/test_merge.py::test_what_is_not_merged"),
    Fault("sparsegpt corrects with the wrong sign", "macko/pruning/prune.py", "w[:, stop:] -= errors",
          "w[:, stop:] += errors", "tests/test_prune.py::test_sparsegpt_across_blocks"),
    Fault("of equal scores one too few is pruned", "macko/pruning/prune.py", "dtype=torch.int32) <= left",
          "dtype=torch.int32) < left", "tests/test_prune.py::test_ties_go_by_column"),
    Fault("n:m keeps m - n", "macko/pruning/prune.py", "order[:, : m - n]", "order[:, :n]",
          "tests/test_prune.py::test_patterns_hold_exactly"),
    Fault("wanda without the root", "macko/pruning/prune.py", "seen.sqrt()", "seen",
          "tests/test_prune.py::test_wanda_on_a_worked_example"),
    Fault("a fit that is worse is taken", "macko/pruning/reconstruct.py", "(after := self._whole() / energy) < before:",
          "(after := self._whole() / energy) >= 0:",
          "tests/test_reconstruct.py::test_what_fits_worse_is_not_taken"),
    Fault("the dense model's inputs are the pruned one's", "macko/pruning/reconstruct.py", "self._hidden = made",
          "self._hidden = None",
          "tests/test_reconstruct.py::test_targets_are_the_dense_models_and_inputs_the_pruned_ones"),
    Fault("zeros beyond a layer's bound", "macko/pruning/allocate.py", "more = min(left, end - found[name])",
          "more = left",
          "tests/test_reconstruct.py::test_an_allocation_by_hand"),
    Fault("rounding fills zeros", "macko/pruning/prune.py", "& (share == 0)", "& (share < 0)",
          "tests/test_evaluate.py::test_rounding_in_sparsegpts_order_beats_rounding_behind_it"),
    Fault("a layer's bias is lost", "macko/nn/linear.py", "self._header, bias)", "self._header, None)",
          "tests/test_linear.py::test_looks_like_linear tests/test_linear.py::test_any_leading_shape"),
    Fault("load_state_dict does not validate", "macko/weights/saved.py", "        packed.validate()\n",
          "        pass\n", "tests/test_linear.py::test_hostile_state_dict"),
    Fault("no cast under autocast", "macko/nn/linear.py", "return multiply(input.to(self.dtype), tensors",
          "return multiply(input, tensors", "tests/test_linear.py::test_autocast_gives_its_own_dtype"),
    Fault("what comes under autocast has the layer's dtype", "macko/nn/linear.py",
          "return multiply(input.to(self.dtype), tensors, self._header, added).to(dtype)",
          "return multiply(input.to(self.dtype), tensors, self._header, added)",
          "tests/test_linear.py::test_autocast_gives_its_own_dtype"),
    Fault("a file of the next version is read", "macko/files.py", "if version > VERSION:",
          "if version > VERSION + 1:", "tests/test_files.py::test_an_unknown_version_is_refused"),
    Fault("a packed layer of a file is not validated", "macko/files.py", "            weight.validate()\n", "",
          "tests/test_files.py::test_a_damaged_layer_is_refused_by_name"),
    Fault("a shard's first gap is another row's, within a byte", "macko/weights/canonical.py",
          "[first % in_byte :]", "[:]",
          "tests/test_shards.py::test_a_cut_within_a_byte_and_a_chunk"),
    Fault("a part of 8 bits has the first rows' scales", "macko/weights/base.py", "scales[start:stop].clone()",
          "scales[: stop - start].clone()",
          "tests/test_shards.py::test_gathered_parts_of_8_bits_are_not_rounded_again"),
    Fault("a weight's strides are not looked at", "csrc/macko/ops.cpp", "const Tensor w = as_contiguous(w_any);",
          "const Tensor w = w_any;", "tests/kernels/test_products.py::test_a_weight_of_any_stride_and_alignment"),
    Fault("parts of fp8 and int8 are joined", "macko/weights/shards.py", "if len(ways) > 1:", "if False:",
          "tests/test_shards.py::test_parts_that_hold_values_in_several_ways_are_refused"),
    Fault("a GPU without wgmma is judged by tile's times of another", "macko/choose/auto.py",
          'kernels == "wgmma" or table.at(tokens).measured', "True",
          "tests/test_tune.py::test_tiles_times_of_another_gpu_are_of_its_kernel"),
    Fault("a table's own times of sparse11 count", "macko/choose/times.py", '"bitmap", "sell"',
          '"bitmap", "sparse11", "sell"',
          "tests/test_tune.py::test_sparse11_is_taken_in_place_of_tile_and_not_by_its_own_times"),
    Fault("a GPU has the times of the memory that is farthest", "macko/choose/times.py", "table = min(timed, key=",
          "table = max(known, key=", "tests/test_tune.py::test_another_gpu_is_judged_by_its_bandwidth"),
    Fault("what has no gradients does not say so", "macko/ops.py",
          "tensor.requires_grad for tensor", "False for tensor",
          "tests/test_formats.py::test_what_has_no_gradients_says_so"),
    Fault("ignore= takes full names only", "macko/nn/find.py", 'p in (n, n.rpartition(".")[2])', "p == n",
          "tests/test_convert.py::test_ignore_takes_names_last_components_and_globs"),
    Fault("a tied layer's copy is counted by itself", "macko/nn/convert.py",
          "shorter.bytes_after += shorter.bytes_before", "pass",
          "tests/test_compress.py::test_tied_embeddings_are_copied_when_asked"),
    Fault("exact values where tile is faster", "macko/choose/auto.py", "(gain or 1) >= SPARSE11_GAIN",
          "(gain or 1) >= 0", "tests/test_sparse11.py::test_exact_values_stay_where_tile_was_measured_faster"),
    Fault("zeros count as values outside of the table", "macko/choose/exponents.py",
          "int(counts.sum()) - (zeros if signed else 0)", "int(counts.sum())",
          "tests/test_inspect.py::test_what_inspect_counts_is_what_formats_list"),
    Fault("the yardstick grows with the columns", "macko/measure/reference.py",
          "always, random = cols + 2, deviations * math.sqrt(cols + 2)", "always = random = cols + 2",
          "tests/test_reference.py::test_is_four_times_the_error_at_most"),
    Fault("of few rows a layout may fill up dense's bytes", "macko/choose/auto.py",
          "0 if weight.rows < FEW_ROWS else 1 if many", "1 if many",
          "tests/test_tune.py::test_of_few_rows_no_layout_holds_more_than_the_canonical_format_and_a_twentieth"),
    Fault("transformers joins packed layers", "macko/integrations/saving.py",
          "names = _own_names(model, rest) or set()", "names = set()",
          "tests/test_transformers.py::test_layers_that_files_hold_as_one_tensor"),
    Fault("where the first of fused layers stays dense all do", "macko/integrations/transformers.py",
          'return packed or (key == "weight" and self._starts_a_group(param_name))', "return packed",
          "tests/test_transformers.py::test_one_of_the_layers_that_files_hold_as_one_is_left_dense"),
    Fault("a layer that no file has is random", "macko/integrations/transformers.py",
          "if not _starts_anew(model, name)]", "if not name]",
          "tests/test_transformers.py::test_a_layer_that_no_file_has_is_refused"),
    Fault("float32 that transformers keeps is cast", "macko/integrations/transformers.py",
          'if re.search(pattern.replace("*", ".*"), name):', "if False:",
          "tests/test_transformers.py::test_float32_that_transformers_keeps"),
    Fault("a classifier is packed by default", "macko/nn/find.py", "elif id(layer.module) in heads:", "elif False:",
          "tests/test_transformers.py::test_output_heads_stay_dense_and_unpruned"),
)  # fmt: skip


def is_native(fault: Fault) -> bool:
    return fault.file.startswith(("csrc/", "contrib/"))


class PlanError(Exception):
    """The faults or the tests are not what this file says."""


def build(copy: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=copy, env={**os.environ, "MACKO_CUDA": "0"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise PlanError(f"it does not compile:\n{(done.stdout + done.stderr)[-2000:]}")


def test(tests: list[str], copy: Path, timeout_s: int) -> tuple[int, str]:
    """Exit status, negative of a signal's where one ended it, and the output.

    In a fork of this process, which has imported what takes seconds: most tests take less.
    """
    marks = "not gpu" if "::" in tests[0] else "not slow and not gpu"  # a test that is named may be slow
    options = ["-x", "-q", "-m", marks, "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    with tempfile.TemporaryFile("w+") as output:
        if (child := os.fork()) == 0:
            os.setpgid(0, 0)
            signal.alarm(timeout_s)
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            os.chdir(copy)
            os.environ["PYTHONPATH"] = str(copy)
            sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
            sys.dont_write_bytecode = True
            for name in [name for name in sys.modules if name.partition(".")[0] == "verify"]:
                del sys.modules[name]
            status = 70
            try:
                status = int(pytest.main([*tests, *options]))
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it started
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def caught_by(fault: Fault, copy: Path, timeout_s: int) -> str:
    """The test that fails with it and passes without, or nothing. The copy is clean again after it."""
    path = copy / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise PlanError(f"{fault.file} has {fault.old!r} {text.count(fault.old)} times, expected once")
    native = is_native(fault)
    clean = (copy / LIBRARY).read_bytes() if native else b""
    path.write_text(text.replace(fault.old, fault.new))
    try:
        if native:
            build(copy)
        status, output = test(fault.tests.split(), copy, timeout_s)
    finally:
        path.write_text(text)
        if native:
            (copy / LIBRARY).unlink(missing_ok=True)  # a new file: the old one may be mapped
            (copy / LIBRARY).write_bytes(clean)
    if status in (4, 5):
        raise PlanError(f"{fault.tests}: no such tests:\n{output[-2000:]}")
    if status == 0:
        return ""
    found = [line.partition(" ")[2] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = [found[0].partition(" - ")[0]] if found else fault.tests.split()
    clean_status, output = test(failed, copy, timeout_s)
    if clean_status != 0:
        raise PlanError(f"{failed[0]} fails without a fault:\n{output[-2000:]}")
    return failed[0] if found else f"over {timeout_s} s" if status == -signal.SIGALRM else f"exit status {status}"


def copy_source(copy: Path) -> None:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.splitlines():
        source, target = ROOT / name, copy / name
        if source.is_file() and not (target.is_file() and target.read_bytes() == source.read_bytes()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="faults that have it in what they are, or where")
    parser.add_argument(
        "--timeout", metavar="S", type=int, default=120, help="seconds for a fault's tests (%(default)s)"
    )
    parser.add_argument("--folder", help="build in it and leave it, for the next run (default: a temporary one)")
    parser.add_argument("--log", metavar="FILE", help="a line of JSON for each fault; those it has are not tried again")
    parser.add_argument("--out", metavar="FILE", help="append a line of JSON, once all have run")
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if args.only in f"{fault.what} {fault.file}"]
    not_tried = [fault.what for fault in faults if fault.path and torch.backends.cpu.get_cpu_capability() != "AVX512"]
    faults = [fault for fault in faults if fault.what not in not_tried]
    if not_tried:
        print("not tried, as this CPU has no AVX-512:", *not_tried)
    faults.sort(key=is_native)  # those that take a build come last
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    caught: dict[str, str] = {}
    if args.log and Path(args.log).exists():
        caught = {line["fault"]: line["caught_by"] for line in map(json.loads, Path(args.log).read_text().splitlines())}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(args.folder or folder).resolve()
        copy_source(copy)
        for name in ("hypothesis", "transformers.models.llama.modeling_llama"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        build(copy)
        for number, fault in enumerate(faults, 1):
            if fault.what in caught:
                continue
            start = time.monotonic()
            try:
                caught[fault.what] = caught_by(fault, copy, args.timeout)
            except PlanError as error:
                print(f"{number:2}  {fault.file}: {fault.what}: {error}", flush=True)
                continue
            took = time.monotonic() - start
            catcher = caught[fault.what] or "SURVIVES"
            print(f"{number:2} {took:4.0f} s  {fault.file}: {fault.what}: {catcher}", flush=True)
            if args.log:
                line = {"commit": commit, "fault": fault.what, "caught_by": caught[fault.what], "seconds": round(took)}
                with open(args.log, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    survivors = [fault.what for fault in faults if caught.get(fault.what) == ""]
    broken = [fault.what for fault in faults if fault.what not in caught]
    print(f"{len(faults) - len(survivors) - len(broken)} of {len(faults)} caught")
    if args.out and not args.only and not broken:
        line = {
            "commit": commit,
            "what": "mutants",
            "faults": len(faults),
            "survivors": survivors,
            "not_tried": not_tried,
        }
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 2 if broken else 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
