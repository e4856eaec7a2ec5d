"""Instruments of the tests, the benchmarks and the generated pages; not shipped.

``apiserver`` adds a request log and fault injection to the embedded API server, ``nvml_faults``
to the simulated driver.
"""
