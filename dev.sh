python3 -c "import transformers, torch, sys; print(sys.version, torch.__version__, transformers.__version__)"; df -h /dev/shm $HOME /tmp | tail -3; python3 -c "import accelerate, peft" 2>&1 | tail -1
export PYTHONDONTWRITEBYTECODE=1
(timeout 75 python3 -m pytest -q -x --maxfail=8 -p no:cacheprovider tests/test_prune.py tests/test_files.py tests/test_transformers.py tests/test_cli.py --durations=5 > $OUT/tests.txt 2>&1; tail -40 $OUT/tests.txt | cut -c1-250)
F=/dev/shm/macko; [ $(df --output=avail -B1 /dev/shm | tail -1) -gt 30000000000 ] || F=/tmp/mackofolder
timeout 120 python3 -m benchmarks.models --folder $F --out $OUT/models.jsonl 2>&1 | grep -v "it/s\|model shards" | tail -40
