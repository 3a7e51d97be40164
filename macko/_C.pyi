cuda_arches: str
layouts: dict[str, int]
cpu_path: str

def slab_kernels(major: int) -> tuple[str, int]: ...
