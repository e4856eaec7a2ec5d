"""What objects of the Kubernetes API say, free of the library that brought them."""
