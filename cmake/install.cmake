# `cmake --install` and `find_package(seqmix)`. The package holds no path of the build and no processor's name.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(seqmix_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/seqmix")

install(TARGETS seqmix EXPORT seqmixTargets FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT seqmixTargets NAMESPACE seqmix:: DESTINATION "${seqmix_package_dir}")

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/seqmixConfig.cmake.in" "${PROJECT_BINARY_DIR}/seqmixConfig.cmake"
                              INSTALL_DESTINATION "${seqmix_package_dir}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/seqmixConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/seqmixConfig.cmake" "${PROJECT_BINARY_DIR}/seqmixConfigVersion.cmake"
              "${CMAKE_CURRENT_LIST_DIR}/precompiled.cmake"
        DESTINATION "${seqmix_package_dir}")
