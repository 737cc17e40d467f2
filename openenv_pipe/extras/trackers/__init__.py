"""Trackers for the tools that people use: TensorBoard, W&B, MLflow, Trackio and OpenTelemetry."""
