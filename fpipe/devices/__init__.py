"""The CPU and GPUs: fpipe reaches their streams, events, generators, memory and graphs through `Device` alone."""

from fpipe.devices.autocast import autocasts as autocasts
from fpipe.devices.autocast import without_autocast as without_autocast
from fpipe.devices.devices import Cpu as Cpu
from fpipe.devices.devices import Cuda as Cuda
from fpipe.devices.devices import all_generators as all_generators
from fpipe.devices.devices import cuda_count as cuda_count
from fpipe.devices.devices import current_device as current_device
from fpipe.devices.devices import device_of as device_of
from fpipe.devices.host_copy import HostCopy as HostCopy
from fpipe.devices.interface import CaptureError as CaptureError
from fpipe.devices.interface import Device as Device
from fpipe.devices.interface import Event as Event
from fpipe.devices.interface import Graph as Graph
from fpipe.devices.interface import GraphReset as GraphReset
from fpipe.devices.interface import Lane as Lane
from fpipe.devices.interface import Stream as Stream
from fpipe.devices.tape import aside as aside
from fpipe.devices.tape import is_capturing as is_capturing
from fpipe.devices.tape import launch as launch
from fpipe.devices.tape import try_again as try_again
