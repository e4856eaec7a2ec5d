"""The machine: files, processes, device nodes, services, signals of the kernel."""
