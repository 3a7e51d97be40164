cuda_arches: str
cpu_path: str
