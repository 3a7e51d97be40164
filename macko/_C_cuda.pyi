layouts: dict[str, int]
