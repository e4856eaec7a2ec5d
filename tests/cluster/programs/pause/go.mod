module mig-manager.io/envtest/pause

go 1.24.0
