// What a plan costs and holds. Not for users of plan.h.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/assign.h"
#include "engine/plan.h"

namespace dmuon {

// Of `plan`, whose matrices got these `slots`. `problem` has true costs, `order` lets them fall.
PlanReport make_report(const OwnershipPlan& plan, const AssignProblem& problem,
                       const std::vector<int32_t>& order, const std::vector<int32_t>& slots);

}  // namespace dmuon
