cuda_arches: str
layouts: dict[str, int]
cpu_path: str
