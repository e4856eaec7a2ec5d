module mig-manager.io/envtest/wrapper

go 1.24.0
