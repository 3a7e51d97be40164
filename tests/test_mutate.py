"""verify/mutate.py can plant its faults: what it looks for is still there. `make mutants` says whether tests notice."""

from verify.mutate import FAULTS, ROOT


def test_the_text_of_each_fault_is_there_just_once() -> None:
    gone = [fault.what for fault in FAULTS if (ROOT / fault.file).read_text().count(fault.old) != 1]
    assert not gone


def test_each_fault_names_tests_that_are_there() -> None:
    files = {name.partition("::")[0] for fault in FAULTS for name in fault.tests.split()}
    assert [name for name in files if not (ROOT / name).is_file()] == []
