#pragma once  // cuda_shim.h, included before every kernel, already declares all of it
