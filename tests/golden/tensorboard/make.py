#!/usr/bin/env python3
"""Writes `events`: what TensorBoard's own writer makes of a few events, for spec/tensorboard_spec.lua.

    pip install tensorboard && tests/golden/tensorboard/make.py
"""
import os

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

TIME = 1795500000.25
Value, Event = summary_pb2.Summary.Value, event_pb2.Event

text = tensor_pb2.TensorProto(
    dtype=7, string_val=["    one\n    twö �".encode()],
    tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)]))
histogram = summary_pb2.HistogramProto(min=-1.5, max=2.5, num=6, sum=3.25, sum_squares=11.5,
                                       bucket_limit=[-0.5, 0.5, 2.5], bucket=[1, 2, 3])
metadata = summary_pb2.SummaryMetadata(plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"))

with open(os.path.join(os.path.dirname(__file__), "events"), "wb") as file:
    writer = RecordWriter(file)
    for event in [
        Event(wall_time=TIME, file_version="brain.Event:2"),
        Event(wall_time=TIME, step=300, session_log=event_pb2.SessionLog(status=1)),
        Event(wall_time=TIME, step=300, summary=summary_pb2.Summary(
            value=[Value(tag="loss", simple_value=0.1), Value(tag="tok_s", simple_value=float("inf"))])),
        Event(wall_time=TIME, step=301, summary=summary_pb2.Summary(
            value=[Value(tag="sample", tensor=text, metadata=metadata)])),
        Event(wall_time=TIME, step=70000, summary=summary_pb2.Summary(
            value=[Value(tag="gradients/w", histo=histogram)])),
    ]:
        writer.write(event.SerializeToString())
