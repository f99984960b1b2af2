"""Fuzzing of everything that reads an untrusted file: `python tests/fuzz/run.py --seconds 60`.

One module of `targets` each; `worker` runs one in a process of its own under libFuzzer.
"""
