"""Weights & Biases, TensorBoard, MLflow and Trackio, told of a run behind one protocol."""
