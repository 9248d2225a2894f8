// Products are in warpgroup.cuh here.
#pragma once

#include "elements.cuh"
