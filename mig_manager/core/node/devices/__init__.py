"""The devices that a node advertises: names, ids, ResourceSlices, and whether pods get them."""
