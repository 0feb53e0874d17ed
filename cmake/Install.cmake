# The C++ package: `cmake --install build --component cpp --prefix <folder>`, then
# find_package(dmuon) gives dmuon::ddp and what it stands on. Headers are found as in the tree
# ("engine/engine.h"), and below dmuon/.
include(CMakePackageConfigHelpers)

foreach(name IN ITEMS kernels plan engine replicas ddp)
  target_include_directories(dmuon_${name} INTERFACE
    "$<INSTALL_INTERFACE:include>" "$<INSTALL_INTERFACE:include/dmuon>")
  set_target_properties(dmuon_${name} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS dmuon_${name} EXPORT dmuon ARCHIVE DESTINATION lib COMPONENT cpp)
endforeach()
install(DIRECTORY kernels engine DESTINATION include/dmuon COMPONENT cpp
  FILES_MATCHING PATTERN "*.h")
install(DIRECTORY adapters/ddp DESTINATION include/dmuon/adapters COMPONENT cpp
  FILES_MATCHING PATTERN "*.h")

set(package lib/cmake/dmuon)
install(EXPORT dmuon NAMESPACE dmuon:: FILE dmuonTargets.cmake DESTINATION ${package}
  COMPONENT cpp)
configure_package_config_file(cmake/dmuonConfig.cmake.in ${PROJECT_BINARY_DIR}/dmuonConfig.cmake
  INSTALL_DESTINATION ${package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/dmuonConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  cmake/Torch.cmake
  ${PROJECT_BINARY_DIR}/dmuonConfig.cmake
  ${PROJECT_BINARY_DIR}/dmuonConfigVersion.cmake
  DESTINATION ${package} COMPONENT cpp)
