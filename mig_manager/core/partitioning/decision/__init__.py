"""What one decision requests of nodes, holds for pods and lets wait."""
