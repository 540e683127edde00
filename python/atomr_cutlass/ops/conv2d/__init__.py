"""Convolution in two dimensions and its gradients."""
